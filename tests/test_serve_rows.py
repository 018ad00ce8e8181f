"""The rows of a run's log, as the server hands them out while it trains."""

import json

import pytest

from modepth.runlog import RunLog
from modepth.serve.rows import rows_since
from tests.serving import serving, tiny_served


def row(step, **more):
    trained = {"step": step, "loss": 5 - step / 50, "flops": 1e9 * step}
    return {**trained, "gradient_norm": 1.0, "tokens_per_second": 9e3, **more}


def layers(share):
    return {"layers": {"1": {"share": share, "gate": 0.5, "cutoff": 0.1}, "3": {"share": 0.125, "gate": 0.4}}}


def write_log(folder):
    """Trained rows, the last with a number that is none; a measurement; an event."""
    log = RunLog(folder)
    for step in range(0, 40, 5):
        log.add(row(step, **layers(0.1 + step / 1000), gradient_norm=1.5 if step < 35 else float("nan")))
    log.add({"step": 40, "flops": 4e10, "validation": {"loss": 4.5}})
    log.add({"step": 41, "event": "update not applied", "reason": "<b>loss</b> is nan"})
    return log


def test_rows_are_sent_once_and_hold_no_number_that_is_none(tmp_path):
    run = write_log(tmp_path)
    with serving(lambda: tiny_served(log=run)) as client:
        first = client.get("/v1/run").json()
        assert len(first["rows"]) == 10
        assert first["rows"][0]["layers"]["1"] == {"share": 0.1, "gate": 0.5}
        assert first["rows"][7]["gradient_norm"] is None
        known = {"start": 10, "log": first["log"]}
        assert client.get("/v1/run", params=known).json()["rows"] == []
        run.add(row(45))
        assert [each["step"] for each in client.get("/v1/run", params=known).json()["rows"]] == [45]
        assert len(client.get("/v1/run", params=known | {"start": 4}).json()["rows"]) == 7
        run.drop_from(10)
        again = client.get("/v1/run", params=known).json()
        assert (again["start"], [each["step"] for each in again["rows"]]) == (0, [0, 5])
        assert client.get("/v1/run", params=known | {"start": 1}).json()["start"] == 0  # the first was of another log
        assert client.get("/v1/run?start=-1").status_code == 400
        run.path.unlink()
        assert client.get("/v1/run").json()["rows"] == []
        assert json.loads(client.get("/openapi.json").text)["paths"]["/v1/run"]


def test_nothing_is_read_twice_and_no_half_row_is_told(tmp_path):
    log = write_log(tmp_path)
    first = rows_since("mine", log, 0, "")
    with log.path.open("r+b") as file:
        file.write(b"overwritten")  # whoever reads it again cannot go on
    log.add(row(45))
    with log.path.open("a") as file:
        file.write('{"step": 50, "lo')
    news = rows_since("mine", log, 10, first["log"])
    assert (news["start"], [each["step"] for each in news["rows"]]) == (10, [45])
    with log.path.open("a") as file:
        file.write('ss": 4.0}\n')
    again = rows_since("mine", log, 11, news["log"])
    assert (again["start"], [each["step"] for each in again["rows"]]) == (11, [50])
    assert rows_since("mine", log, 12, again["log"])["log"] == again["log"]


@pytest.mark.parametrize(
    "known", ["", "5", "1-2-3", "x-1-1", "-1-10-100", "9" * 99, "{file}-10-999999999", "{file}-٣-1"]
)
def test_who_knows_nothing_of_this_log_is_told_all_of_it(tmp_path, known):
    log = write_log(tmp_path)
    told = rows_since("mine", log, 3, known.format(file=log.path.stat().st_ino))
    assert (told["start"], len(told["rows"])) == (0, 10)
