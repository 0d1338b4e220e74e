"""A sweep that ended early goes on where its report ends."""

from tests.compositions.__main__ import main
from tests.compositions.cases import cases, chosen, rotated

LISTED = ["--models", "t5", "--list", "--go-on", "--report"]


def test_what_the_report_has_as_it_should_be_is_left_out(tmp_path, capsys):
    first, second, third, *rest = map(str, chosen(rotated(cases()), models="t5", strategies="", variants=""))
    report = tmp_path / "report"
    report.write_text(f"ok\t1.00\t{first}\t''\nrefused\t0.10\t{second}\t''\nwrong\t1.00\t{third}\t'no'\n")
    assert main([*LISTED, str(report)]) == 0
    assert capsys.readouterr().out.splitlines() == [third, *rest]


def test_without_a_report_all_are_tried(tmp_path, capsys):
    assert main([*LISTED, str(tmp_path / "none")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(
        chosen(rotated(cases()), models="t5", strategies="", variants="")
    )
