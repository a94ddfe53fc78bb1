"""Loading a task: which forms work, and what a broken one is told."""

import textwrap

import pytest

from comlrl_stages.errors import UserError
from comlrl_stages.tasks.protocol import Exchange, TaskSource, default_formatter, describe_task, load_task

ITEM = {"task_id": "i1", "prompt": "Say {hello} 🙂"}


@pytest.fixture
def written(tmp_path):
    """Write a user's file and return the source of the task in it."""

    def write(code, object="Task", **options):
        path = tmp_path / "my_task.py"
        path.write_text(textwrap.dedent(code), encoding="utf-8")
        return TaskSource(file=str(path), object=object, options=options)

    return write


FORMS = {
    "class with methods": """
        class Task:
            def reward(self, first, second, *, batch_items):
                return [1.0]
            def formatters(self, item):
                return item["prompt"]
    """,
    "class with plain functions": """
        class Task:
            def reward(first, second, *, batch_items):
                return [1.0]
            def formatters(item):
                return item["prompt"]
    """,
    "class with static methods": """
        def reward_func(brief_completions, detailed_completions, *, batch_items):
            return [1.0]
        class Task:
            reward = staticmethod(reward_func)
            formatters = [staticmethod(lambda item: item["prompt"]), lambda item: item["prompt"]]
    """,
    "class that names functions of the module": """
        def reward_func(brief_completions, detailed_completions, *, batch_items):
            return [1.0]
        def same(item):
            return item["prompt"]
        class Task:
            reward = reward_func
            formatters = same
    """,
    "instance": """
        class Any:
            def __init__(self):
                self.reward = lambda first, second, *, batch_items: [1.0]
        Task = Any()
    """,
    "function that returns a task": """
        from types import SimpleNamespace
        def Task():
            return SimpleNamespace(reward=lambda first, second, *, batch_items: [1.0])
    """,
    "callable objects": """
        class Reward:
            def __call__(self, first, second, *, batch_items):
                return [1.0]
        class Task:
            reward = Reward()
    """,
    "a decorated function": """
        import functools
        def loud(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                return function(*args, **kwargs)
            return wrapper
        class Task:
            @loud
            def reward(first, second, *, batch_items):
                return [1.0]
    """,
}


@pytest.mark.parametrize("code", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_a_task_loads(code, written):
    task = load_task(written(code))
    assert task.agents == 2
    assert task.format(ITEM) == ["Say {hello} 🙂"] * 2
    assert task.reward([["a"], ["b"]], [ITEM], {}) == [1.0]


def test_a_module_is_a_task_when_object_is_null(written):
    source = written("def reward(first, second, third):\n    return [0.0]\n", object=None)
    assert load_task(source).agents == 3


def test_options_reach_the_class_and_unknown_ones_are_refused(written):
    code = """
        class Task:
            def __init__(self, bonus=1):
                self.bonus = bonus
            def reward(self, first):
                return [self.bonus]
    """
    assert load_task(written(code, bonus=5)).reward([["a"]], [ITEM], {}) == [5]
    with pytest.raises(UserError, match=r"bonsu.*It takes: bonus"):
        load_task(written(code, bonsu=5))


def test_items_and_prompts_are_passed_by_name_only_where_declared(written):
    code = """
        seen = []
        class Task:
            def reward(first, second, *, prompts, batch_items=None, weight=2.0):
                return [(prompts, batch_items, weight)]
    """
    task = load_task(written(code))
    assert task.reward([["a"], ["b"]], [ITEM], {}) == [([ITEM["prompt"]], [ITEM], 2.0)]
    assert task.reward([["a"], ["b"]], [ITEM], {"weight": 3.0})[0][2] == 3.0
    task.reward.check_parameters({"weight": 3.0}, "here")
    with pytest.raises(UserError, match=r"no parameter 'wieght'.*nearest: 'weight'"):
        task.reward.check_parameters({"wieght": 3.0}, "here")


def test_star_completions_take_the_number_of_agents_from_formatters_or_agents(written):
    star = "class Task:\n    def reward(*completions, batch_items):\n        return [len(completions)]\n"
    assert load_task(written(star + "    agents = 3\n")).agents == 3
    three = star + "    formatters = [lambda i: 'a', lambda i: 'b', lambda i: 'c']\n"
    assert load_task(written(three)).reward([["a"], ["b"], ["c"]], [ITEM], {}) == [3]
    with pytest.raises(UserError, match="number of agents is unknown"):
        load_task(written(star))


@pytest.mark.parametrize(
    "signature",
    [
        "",
        "*, batch_items",
        "first, second, batch_items",
        "first, *rest",
        "first, second, *, target",
        "first, second, **kwargs",
    ],
)
def test_another_signature_is_refused_with_the_expected_form(signature, written):
    code = f"class Task:\n    def reward({signature}):\n        return [1.0]\n"
    with pytest.raises(UserError, match=r"signature.*Expected reward\(completions_0"):
        load_task(written(code))


REWARD = "    def reward(first, second):\n        return [1.0]\n"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ("    items = []\n", "has no reward"),
        ("    reward = 3\n", "reward is int, expected a function"),
        (REWARD + "    formatters = [lambda item: 'a']\n", "2 by the reward's parameters, 1 by formatters"),
        (REWARD + "    agents = 3\n", "2 by the reward's parameters, 3 by agents"),
        (REWARD + "    agents = 'two'\n", "agents is 'two'"),
        (REWARD + "    formatters = ['a', 'b']\n", "formatters has str for agent_0"),
        (REWARD + "    reward_scope = 'agents'\n", "reward_scope is 'agents'"),
        (REWARD + "    eval_logger = print\n", "eval_logger and eval_aggregator work together"),
    ],
)
def test_a_broken_task_is_refused(members, message, written):
    with pytest.raises(UserError, match=message):
        load_task(written("class Task:\n" + members))


def test_the_default_formatter_needs_a_prompt(written):
    task = load_task(written("class Task:\n" + REWARD))
    with pytest.raises(UserError, match=r"agent_0, item i2: the item has no prompt \(its fields: task_id, text\)"):
        task.format({"task_id": "i2", "text": "x"})
    assert default_formatter({"prompt": ""}) == ""


def test_a_failing_formatter_shows_item_agent_and_the_users_line(written):
    code = """
        def fine(item):
            return item["prompt"]
        def broken(item):
            return item["missing"]
        class Task:
            formatters = [fine, broken]
    """
    task = load_task(written(code.rstrip() + "\n        " + REWARD.replace("\n", "\n        ")))
    with pytest.raises(UserError) as failure:
        task.format(ITEM)
    message = str(failure.value)
    assert "agent_1, item i1" in message
    assert 'my_task.py", line 5, in broken' in message
    assert "protocol.py" not in message
    assert isinstance(failure.value.__cause__, KeyError)


def test_sys_exit_in_a_formatter_or_a_factory_is_a_mistake_and_no_end(written):
    task = load_task(written("import sys\nclass Task:\n    formatters = lambda item: sys.exit(0)\n" + REWARD))
    with pytest.raises(UserError, match=r"(?s)the formatter of agent_0, item i1 raised.*SystemExit: 0"):
        task.format(ITEM)
    with pytest.raises(UserError, match=r"(?s)could not be made from its options.*SystemExit: 0"):
        load_task(written("import sys\ndef Task():\n    sys.exit(0)\n"))


def test_a_formatter_must_return_text(written):
    task = load_task(written("class Task:\n    formatters = lambda item: None\n" + REWARD))
    with pytest.raises(UserError, match="agent_0, item i1 returned NoneType"):
        task.format(ITEM)


def test_external_prompts_reach_the_formatters_that_declare_them(written):
    code = """
        def first(item, external_prompts=None):
            return f"{item['prompt']}|{external_prompts}"
        def second(item):
            return item["prompt"]
        class Task:
            formatters = [first, second]
            def reward(a, b):
                return [1.0]
    """
    task = load_task(written(code))
    assert task.format(ITEM) == ["Say {hello} 🙂|None", "Say {hello} 🙂"]
    assert task.format(ITEM, ["again", "more"]) == ["Say {hello} 🙂|again", "more"]


def test_an_import_error_names_file_and_line(written):
    with pytest.raises(UserError, match=r"my_task.py, line 3: cannot be imported"):
        load_task(written("x = 1\n\nimport no_such_module\n"))
    with pytest.raises(UserError, match=r"my_task.py, line 2: cannot be imported"):
        load_task(written("x = 1\ndef broken(:\n"))
    with pytest.raises(UserError, match="no such file"):
        load_task(TaskSource(file="nowhere/task.py"))


def test_siblings_can_be_imported_at_the_top_and_inside_functions(written, tmp_path):
    (tmp_path / "sibling_of_a_task.py").write_text("VALUE = 7\n")
    (tmp_path / "another_sibling_of_a_task.py").write_text("VALUE = 8\n")
    code = """
        from sibling_of_a_task import VALUE
        class Task:
            def reward(first):
                from another_sibling_of_a_task import VALUE as later
                return [VALUE + later]
    """
    assert load_task(written(code)).reward([["a"]], [ITEM], {}) == [15]


def test_a_misspelt_object_or_task_names_the_nearest(written):
    with pytest.raises(UserError, match=r"no object named 'Tsk' \(nearest: 'Task'\)"):
        load_task(written("class Task:\n" + REWARD, object="Tsk"))
    with pytest.raises(UserError, match="set object to null"):
        load_task(written("def reward(first):\n    return [1.0]\n"))
    with pytest.raises(UserError, match=r"no built-in task 'lenght_ratio' \(nearest: 'length_ratio'\)"):
        load_task(TaskSource(name="lenght_ratio"))


def test_facts_about_a_task_can_be_shown():
    assert describe_task(TaskSource(name="length_ratio")) == {
        "task": "task length_ratio",
        "agents": 2,
        "formatters": ["short_formatter", "detailed_formatter"],
        "reward": "reward",
        "reward_scope": "team",
        "reward_reads": ["batch_items"],
        "reward_parameters": {},
        "has_items": True,
        "has_eval_items": False,
        "has_transition": False,
        "has_eval_logger": True,
        "has_metrics_callback": False,
    }


# --- the next turn ---

TURNS = """
class Task:
    def reward(first, second):
        return [1.0]
    formatters = [lambda item: item["prompt"], lambda item, external_prompts=None: f"<{external_prompts}>"]
    def transition(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
        histories = [prompt_history_per_agent, response_history_per_agent]
        return [str([prompt, agent_completions, num_agents]), str(histories)]
"""


def test_a_transition_makes_the_next_prompts_from_every_turn_so_far(written):
    history = [Exchange(("p0", "p1"), ("a", "b")), Exchange(("q0", "q1"), ("c", "d"))]
    assert load_task(written(TURNS)).next_prompts(ITEM, history) == [
        "['Say {hello} 🙂', ['c', 'd'], 2]",
        "<[[['p0', 'q0'], ['p1', 'q1']], [['a', 'c'], ['b', 'd']]]>",
    ]


@pytest.mark.parametrize(
    "signature",
    [
        "self, prompt, agent_completions, num_agents, prompt_history_per_agent=None, response_history_per_agent=None",
        "*, response_history_per_agent, prompt_history_per_agent, num_agents, agent_completions, prompt, more=1",
        "self, **given",
    ],
)
def test_a_transition_is_called_by_names(written, signature):
    code = f"class Task:\n{REWARD}    def transition({signature}):\n        return 'one', 'two'\n"
    assert load_task(written(code)).next_prompts(ITEM, [Exchange(("p", "q"), ("a", "b"))]) == ["one", "two"]


def test_a_transition_that_declares_the_item_is_given_it(written):
    code = f"class Task:\n{REWARD}    def transition(prompt, item, **given):\n        return [str(item), prompt]\n"
    assert load_task(written(code)).next_prompts(ITEM, [Exchange(("p", "q"), ("a", "b"))]) == [
        str(ITEM),
        ITEM["prompt"],
    ]


@pytest.mark.parametrize("half", ["chr(0xD800)", "'fox ' + chr(0xDFFF)"])
def test_a_prompt_with_half_a_character_is_refused_with_its_item(written, half):
    task = load_task(written(f"class Task:\n{REWARD}    formatters = [lambda item: {half}] * 2\n"))
    with pytest.raises(UserError, match=r"the formatter of agent_0, item .* is a lone surrogate"):
        task.format(ITEM)
    task = load_task(written(f"class Task:\n{REWARD}    def transition(**given):\n        return ['a', {half}]\n"))
    with pytest.raises(UserError, match=r"the transition to turn 2, item .*, for agent_1, .* a lone surrogate"):
        task.next_prompts(ITEM, [Exchange(("p", "q"), ("a", "b"))])


@pytest.mark.parametrize(
    ("signature", "told"),
    [
        ("prompt, agent_completions", "'num_agents'"),
        ("prompts, **given", "'prompts'"),
        ("prompt, *, weather, **given", "'weather'"),
    ],
)
def test_a_transition_of_another_form_is_refused_when_the_task_is_loaded(written, signature, told):
    code = f"class Task:\n{REWARD}    def transition({signature}):\n        return ['next']\n"
    with pytest.raises(UserError, match=r"the transition cannot be called as transition\(prompt, agent_comp") as error:
        load_task(written(code))
    assert told in str(error.value)
