"""Style sheet of the report: two palettes, one for paper, no more than the page uses."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2430; --soft: #5a6675; --rule: #dfe4ea; --grid: #e9edf2;
  --arm0: #56657a; --arm1: #00796b; --good: #17714a; --bad: #b3261e; --open: #8a5a00; --tint: 8%;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f141a; --card: #171e27; --ink: #e6ebf1; --soft: #9aa7b6; --rule: #2b3542; --grid: #222b36;
    --arm0: #a9b8cb; --arm1: #43cdb8; --good: #62d29b; --bad: #ff8d83; --open: #f0b95b; --tint: 13%;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 24px 64px; }
header { margin-bottom: 24px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 6px; font-weight: 650;
  overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 12px; font-weight: 650; }
p { margin: 0 0 8px; }
.lead { color: var(--soft); font-size: 16px; margin: 0; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 20px 24px;
  margin: 0 0 18px; }
.name { font-weight: 650; }
.name.arm0, .big.arm0 { color: var(--arm0); }
.name.arm1, .big.arm1 { color: var(--arm1); }
.verdict { border-left: 5px solid var(--state); background: color-mix(in srgb, var(--state) var(--tint), var(--card)); }
.verdict h2 { color: var(--state); margin-bottom: 4px; }
.verdict p:last-child { margin-bottom: 0; }
.good { --state: var(--good); }
.bad { --state: var(--bad); }
.open { --state: var(--open); }
.sides { display: flex; flex-wrap: wrap; gap: 12px 56px; }
.big { display: block; font-size: 42px; line-height: 1.1; font-weight: 680; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; }
.small { color: var(--soft); overflow-wrap: anywhere; }
.result { font-size: 18px; font-weight: 620; margin: 14px 0 6px; }
figure { margin: 0; }
figcaption, .note { color: var(--soft); font-size: 13px; margin: 10px 0 0; }
.drawing, .wide { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 680px; height: auto; font-size: 12.5px; }
svg text { fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .tick { fill: var(--soft); font-size: 12px; }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg .timer, svg .arm { font-weight: 620; }
svg text.arm0 { fill: var(--arm0); }
svg text.arm1 { fill: var(--arm1); }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .arm0 { --series: var(--arm0); }
svg .arm1 { --series: var(--arm1); }
svg .dot { fill: var(--series); fill-opacity: 0.82; stroke: var(--card); stroke-width: 1; }
svg .hollow { fill: none; stroke: var(--series); stroke-width: 1.5; }
svg .dot { pointer-events: all; }
svg .dot:hover { fill-opacity: 1; stroke: var(--ink); stroke-width: 1.5; }
svg .mean { stroke: var(--series); stroke-opacity: 0.45; stroke-width: 1.2; stroke-dasharray: 3 4; }
svg .whisker { stroke: var(--series); stroke-opacity: 0.5; stroke-width: 1.4; }
svg .box { fill: var(--series); fill-opacity: 0.2; }
svg .median { stroke: var(--series); stroke-width: 2.6; stroke-linecap: round; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; text-align: left; vertical-align: top; }
th:first-child, td.first { padding-left: 0; }
thead th:last-child, td.last { padding-right: 0; }
td[rowspan] { vertical-align: middle; }
thead th { color: var(--soft); font-weight: 560; border-bottom: 1px solid var(--rule); white-space: nowrap; }
tbody { border-bottom: 1px solid var(--rule); }
tbody:last-child { border-bottom: 0; }
tbody th { font-weight: 600; overflow-wrap: anywhere; min-width: 200px; }
.number { text-align: right; white-space: nowrap; }
.path { overflow-wrap: anywhere; }
.badge { display: inline-block; font-size: 11px; font-weight: 600; color: var(--soft); border: 1px solid var(--rule);
  border-radius: 99px; padding: 0 8px; margin-left: 4px; white-space: nowrap; }
ul { margin: 0; padding-left: 20px; }
li { margin-bottom: 4px; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  main { padding: 24px 12px 40px; }
  section { padding: 16px; }
  h1 { font-size: 24px; }
}
@media print {
  :root {
    color-scheme: light;
    --page: #ffffff; --card: #ffffff; --ink: #000000; --soft: #444c56; --rule: #c8ced6; --grid: #e3e7ec;
    --arm0: #56657a; --arm1: #00695c; --good: #17714a; --bad: #b3261e; --open: #7a4f00; --tint: 6%;
  }
  @page { margin: 14mm; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  section { break-inside: avoid; border-radius: 0; padding: 12px 14px; margin-bottom: 12px; }
  svg, .drawing, .wide { min-width: 0; overflow: visible; }
  table { font-size: 10.5px; }
  th, td { padding: 4px 5px; }
  tbody th { min-width: 0; }
  h1 { font-size: 22px; }
}
"""
