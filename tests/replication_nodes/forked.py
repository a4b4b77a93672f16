"""A job on nodes, whose ranks a warm process forks, and which loses nodes between its starts, or at their ends."""

import threading

from tests.adapter.pytorch import launch


class Job:
    """A job whose ranks a warm process forks; they find the durable folder in their arguments."""

    def __init__(self, cluster, zygote, script, folder):
        self.cluster, self.zygote, self.script, self.folder = cluster, zygote, script, folder
        self.starts = 0

    def start(self, what, places, *, kill=None, waiting=None, grace_s=0.2):
        """Run it to its end, or until ranks wait for the end of node ``kill``; returns their reports.

        ``waiting`` is how many have to, None for all; ``grace_s`` after one has ended the others are ended too.
        """
        self.starts += 1
        out = self.folder / f"{self.starts}-{what}"
        out.mkdir()
        ended = threading.Event()
        if kill is not None:
            threading.Thread(target=self._kill, args=(kill, out, waiting or len(places), ended)).start()
        durable = self.folder / "durable"
        try:
            fork, reports = self.cluster.fork, {"REPORTS": str(out)}
            outcome = fork(self.zygote, self.script, what, durable, places=places, grace_s=grace_s, **reports)
        finally:
            ended.set()
        assert not outcome.late, f"ranks hang\n{outcome.log}"
        assert kill is not None or set(outcome.statuses) == {0}, outcome.log
        return launch.reports_in(out, self.script, len(places), outcome.log)

    def _kill(self, node, out, ranks, ended):
        while len(list(out.glob("waiting-*"))) < ranks:
            if ended.wait(0.05):
                return
        self.cluster.kill_node(node)

    def replace(self, node):
        """The node loses all that it has."""
        if self.cluster.nodes[node] is not None:
            self.cluster.kill_node(node)
        self.cluster.boot(node)
