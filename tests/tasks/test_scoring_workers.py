"""What a reward may do to its own process and to others: the stage goes on, and nothing is left over."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from comlrl_stages.errors import UserError
from comlrl_stages.tasks.protocol import TaskSource
from comlrl_stages.tasks.reward_output import KEPT_BYTES
from comlrl_stages.tasks.scoring import RewardRunner, Tolerance

ITEM = {"task_id": "i1", "prompt": "Say hello"}


@pytest.fixture
def runner(tmp_path):
    """Make a RewardRunner for the code of a task."""

    def make(code, **settings):
        path = tmp_path / "rewards.py"
        path.write_text(textwrap.dedent(code), encoding="utf-8")
        return RewardRunner(TaskSource(file=str(path), object=None), **settings)

    return make


def scored(runner, *texts):
    """Score joint responses of two agents by the first one's text."""
    with runner:
        return runner.score([ITEM] * len(texts), [(text, "") for text in texts])


def lives(process):
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_gone_soon(process):
    deadline = time.monotonic() + 20
    while lives(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not lives(process)


# --- the end of the process ---------------------------------------------------------------------------------------

ENDINGS = {
    "os._exit(0)": "ended with exit code 0",
    "os._exit(3)": "ended with exit code 3",
    "ctypes.string_at(0)": "ended with signal SIGSEGV",
    "os.kill(os.getpid(), signal.SIGKILL)": r"ended with signal SIGKILL \(out of memory\?\)",
    "os.fork() or time.sleep(1000); os._exit(4)": "ended with exit code 4",
    "os.closerange(3, 256); time.sleep(1000)": "closed its connection to the stage",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_that_ends_is_an_exception_of_its_item_and_no_time_out(runner, ending):
    code = f"""
        import ctypes, os, signal, time
        def reward(first, second):
            if first[0] == "end":
                {ending}
            return [1.0]
    """
    rewards = scored(runner(code), "a", "end", "b")
    assert [r.status for r in rewards] == ["ok", "exception", "ok"]
    assert re.fullmatch(f"the reward's process {ENDINGS[ending]} while scoring item i1", rewards[1].error)


def test_a_process_that_ends_between_two_calls_costs_nothing(runner):
    with runner("import os\ndef reward(first, second): return [os.getpid()]") as running:
        first = running.score([ITEM], [("a", "")])[0].raw
        os.kill(int(first), signal.SIGKILL)
        again = running.score([ITEM], [("b", "")])[0]
    assert again.status == "ok" and again.raw != first


def test_a_forked_child_that_comes_back_into_the_worker_answers_nothing(runner):
    code = """
        import os
        def reward(first, second):
            return [float(first[0]) if os.fork() else -1.0]
    """
    assert [r.raw for r in scored(runner(code), "1", "2", "3")] == [1.0, 2.0, 3.0]


def test_an_object_that_cannot_be_shown_is_an_exception(runner, capfd):
    code = """
        class Shy:
            def __repr__(self): raise RuntimeError("no looking")
        def reward(first, second): return Shy()
    """
    (reward,) = scored(runner(code), "a")
    assert reward.status == "exception" and "RuntimeError: no looking" in reward.error
    assert "reward_process.py" not in reward.error + capfd.readouterr().err


def test_a_huge_message_is_shortened(runner):
    (reward,) = scored(runner("def reward(first, second): raise ValueError('x' * 1_000_000 + ' end')"), "a")
    assert len(reward.error) < 10_000
    assert "rewards.py" in reward.error and "characters left out" in reward.error and reward.error.endswith("x end")


# --- time limits --------------------------------------------------------------------------------------------------


def test_a_call_that_returns_late_is_late_also_by_a_few_hundredths(runner):
    code = """
        import time
        def reward(first, second):
            time.sleep(float(first[0]))
            return [1.0]
    """
    assert [r.status for r in scored(runner(code, time_limit_s=0.3), "0", "0.35", "0")] == ["ok", "timeout", "ok"]


def test_a_worker_that_replaces_a_late_one_may_load_for_long(runner):
    code = """
        import time
        time.sleep(1)
        def reward(first, second):
            time.sleep(float(first[0]))
            return [1.0]
    """
    rewards = scored(runner(code, time_limit_s=0.5, workers=2), "0", "100", "0.0", "100.0", "0.00")
    assert [r.status for r in rewards] == ["ok", "timeout", "ok", "timeout", "ok"]


# --- more failures than are tolerated -----------------------------------------------------------------------------

HANGS = """
    import time
    def reward(first, second):
        with open({log!r}, "a") as log:
            log.write("+".join(first) + " ")
        for text in first:
            if text.startswith("hang"):
                time.sleep(1000)
            if text.startswith("raise"):
                raise ValueError(text)
        return [1.0] * len(first)
"""


@pytest.fixture
def stopped(runner, tmp_path):
    """Score until the tolerance is exceeded; returns the message and the texts that were called."""

    def run(texts, allowed, **settings):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        running = runner(HANGS.format(log=str(log)), time_limit_s=0.5, **settings)
        running.tolerance = Tolerance(allowed / len(texts), len(texts))
        with pytest.raises(UserError) as error:
            scored(running, *texts)
        return str(error.value), log.read_text().split()

    return run


def test_a_hanging_reward_is_called_until_no_more_failures_are_tolerated(stopped):
    texts = ["fine", *(f"hang{n}" for n in range(30))]
    message, called = stopped(texts, 0)
    assert called == ["fine", "hang0"]
    assert message == (
        "the reward failed for 1 of 2 joint responses so far (31 in all); scoring.tolerate_failures allows a share of "
        "0. The first:\nitem i1, responses 'hang0', '': timeout: the reward took longer than 0.5 s "
        "(scoring.time_limit_s) and was stopped"
    )
    message, called = stopped(texts, 2)
    assert called == ["fine", "hang0", "hang1", "hang2"]
    assert message.startswith("the reward failed for 3 of 4 joint responses so far (31 in all)")


def test_the_failure_that_ends_scoring_is_the_same_at_any_number_of_workers(stopped):
    texts = ["fine", "hang", *(f"raise{n}" for n in range(20))]
    alone, _ = stopped(texts, 1)
    together, _ = stopped(texts, 1, workers=3)
    assert alone == together
    assert "failed for 2 of 3 joint responses" in alone
    assert alone.index("'hang'") < alone.index("'raise0'")


def test_a_failing_batch_is_taken_apart_only_as_far_as_needed(stopped):
    message, called = stopped(["a", "hang1", "hang2", "c", "d", "e"], 0, batch_size=3)
    assert called == ["a+hang1+hang2", "a", "hang1"]
    assert message.startswith("the reward failed for 1 of 2 joint responses so far (6 in all)")


def test_equal_joint_responses_fail_together(stopped):
    message, _ = stopped(["raise", "fine", "raise", "raise"], 2)
    assert message.startswith("the reward failed for 3 of 3 joint responses so far (4 in all)")


# --- what a reward prints -----------------------------------------------------------------------------------------


def test_what_rewards_print_is_shown_up_to_a_limit_and_the_rest_is_counted(runner, capfd):
    code = """
        import os, sys
        print("loading")
        def reward(first, second):
            print("x" * 99_999)
            print("y" * 99_999, file=sys.stderr)
            os.write(1, b"z" * 100_000)
            return [1.0]
    """
    rewards = scored(runner(code, workers=2), *(str(n) for n in range(10)))
    assert [r.status for r in rewards] == ["ok"] * 10
    out, err = capfd.readouterr()
    assert out == ""
    *shown, told = err.splitlines()
    found = re.fullmatch(r"\(the reward printed ([\d,]+) bytes more than the 65,536 shown\)", told)
    assert 0 <= KEPT_BYTES - len("\n".join(shown)) <= 1  # the end of the last line is ours
    loads = sum(line == "loading" for line in shown)
    left_out = int(found[1].replace(",", ""))
    assert left_out in (3_000_000 + 8 * workers - KEPT_BYTES for workers in (loads, 2))


def test_a_little_output_is_shown_whole_also_before_a_crash(runner, capfd):
    code = """
        import os
        def reward(first, second):
            print("grüß dich")
            print("no line end", end="", flush=True)
            os._exit(1)
    """
    scored(runner(code), "a")
    assert capfd.readouterr() == ("", "grüß dich\nno line end\n")


@pytest.mark.parametrize(
    "deed",
    [
        "os.close(1); os.close(2)",
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout = sys.stderr = None",
        "sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = object()",
    ],
)
def test_a_reward_that_closes_or_replaces_its_streams_is_served_on(runner, capfd, deed):
    code = f"""
        import os, sys
        deeds = iter([True])
        def reward(first, second):
            if next(deeds, False):
                {deed}
            return [float(first[0])]
    """
    assert [r.raw for r in scored(runner(code), "1", "2", "3")] == [1.0, 2.0, 3.0]
    assert capfd.readouterr() == ("", "")


def test_a_reward_that_reads_from_the_terminal_gets_none(runner):
    (reward,) = scored(runner("def reward(first, second): return [float(input())]", time_limit_s=20), "a")
    assert reward.status == "exception" and "EOFError" in reward.error


# --- processes that a reward starts -------------------------------------------------------------------------------

SPAWNS = """
    import multiprocessing, os, re, subprocess, sys, time

    def sleep():
        time.sleep(1000)

    def reward(first, second):
        with open({pids!r}, "a") as pids:
            print(os.getpid(), {start}, file=pids)
        if first[0] == "hang":
            re.match(r"(a+)+$", "a" * 60 + "!")
        if first[0] == "crash":
            os._exit(1)
        return [1.0]
"""
CHILD = "subprocess.Popen(['sleep', '1000']).pid"
CHILDREN = {
    "child": CHILD,
    "daemonised": CHILD.replace("])", "], start_new_session=True)"),
    "ignores signals": CHILD.replace("'sleep', '1000'", "'sh', '-c', 'trap \"\" TERM INT HUP; sleep 1000'"),
}
STARTS = {
    **CHILDREN,
    "multiprocessing": "[process := multiprocessing.get_context('fork').Process(target=sleep), process.start()] "
    "and process.pid",
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("text", ["fine", "hang", "crash"])
def test_no_child_of_a_reward_outlives_the_runner(runner, tmp_path, start, text):
    if start == "daemonised" and sys.platform != "linux":
        pytest.skip("children with a session of their own are found on Linux")
    pids = tmp_path / "pids"
    code = SPAWNS.format(pids=str(pids), start=STARTS[start])
    (reward,) = scored(runner(code, time_limit_s=20 if text == "crash" else 1.0), text)
    assert reward.status == {"fine": "ok", "hang": "timeout", "crash": "exception"}[text]
    worker, child = map(int, pids.read_text().split())
    assert is_gone_soon(worker) and is_gone_soon(child)


def test_the_children_of_a_late_call_are_gone_while_the_next_is_served(runner, tmp_path):
    pids = tmp_path / "pids"
    code = SPAWNS.format(pids=str(pids), start=CHILD)
    with runner(code, time_limit_s=1.0) as running:
        running.score([ITEM] * 2, [("hang", ""), ("fine", "")])
        (_, late_child), (_, child) = (map(int, line.split()) for line in pids.read_text().splitlines())
        assert is_gone_soon(late_child) and lives(child)


@pytest.mark.parametrize("start", CHILDREN)
@pytest.mark.parametrize("text", ["hang", "fine"])
def test_workers_and_their_children_end_with_a_killed_stage(tmp_path, start, text):
    if start == "daemonised" and sys.platform != "linux":
        pytest.skip("children with a session of their own are found on Linux")
    pids, task, stage = tmp_path / "pids", tmp_path / "task.py", tmp_path / "stage.py"
    task.write_text(textwrap.dedent(SPAWNS.format(pids=str(pids), start=CHILDREN[start])))
    stage.write_text(
        textwrap.dedent(f"""
            import time
            from comlrl_stages.tasks.protocol import TaskSource
            from comlrl_stages.tasks.scoring import RewardRunner

            with RewardRunner(TaskSource(file={str(task)!r}, object=None), time_limit_s=1000) as runner:
                runner.score([{ITEM!r}], [({text!r}, "")])
                time.sleep(1000)
        """)
    )
    running = subprocess.Popen([sys.executable, str(stage)])
    deadline = time.monotonic() + 60
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.02)
    processes = list(map(int, pids.read_text().split()))
    assert all(map(lives, processes))
    running.kill()
    running.wait()
    assert all(map(is_gone_soon, processes))
