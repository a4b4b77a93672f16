from tools.settings_table import README, with_table


def test_the_readme_lists_every_setting_with_its_default_and_meaning():
    text = README.read_text()
    assert text == with_table(text), "run: python -m tools.settings_table"
