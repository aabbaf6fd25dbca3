"""The demo checkpoint, its tokenizer and its task hold together, and with `renderers`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from examples.demo_model.task import OPERATORS, bash_command, make_tasks, parse_question, score
from tests.helpers.lazy import Lazy
from tests.helpers.llm_servers import DEMO_MODEL, ROOT

transformers = Lazy("transformers")
conversation, tokenizer = (Lazy(f"examples.demo_model.{name}") for name in ("conversation", "tokenizer"))


@pytest.fixture(scope="module")
def maker():
    pytest.importorskip("renderers")
    return conversation.ConversationMaker(transformers.AutoTokenizer.from_pretrained(DEMO_MODEL))


def call(command):
    function = {"name": "execute_bash", "arguments": {"command": command}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


CONVERSATIONS = {
    "question": [{"role": "user", "content": "37 times 85"}],
    "after a tool": [
        {"role": "user", "content": "37 times 85"},
        call("echo $((37*85))"),
        {"role": "tool", "content": "3145"},
    ],
    "two tools and a system prompt": [
        {"role": "system", "content": "You are a calculator."},
        {"role": "user", "content": "1 plus 2"},
        {**call("echo 1"), "content": "two of them"},
        {"role": "tool", "content": "1\n"},
        {"role": "tool", "content": "2"},
    ],
    "second question": [
        {"role": "user", "content": "1 plus 2"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n3"},
        {"role": "user", "content": "4 plus 5"},
    ],
    "reasoning in a tool turn": [
        {"role": "user", "content": "1 plus 2"},
        {**call("echo 3"), "reasoning_content": "add them"},
        {"role": "tool", "content": "3"},
    ],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "execute_bash"}}]])
def test_the_chat_template_renders_what_the_renderer_renders(maker, name, tools):
    messages = CONVERSATIONS[name]
    expected = maker.renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    rendered = maker.tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False
    )
    assert maker.tokenizer.decode(rendered) == maker.tokenizer.decode(expected)
    assert rendered == expected


def test_a_last_assistant_message_renders_like_qwen3s(maker):
    messages = [*CONVERSATIONS["after a tool"], {"role": "assistant", "content": "3145"}]
    assert maker.tokenizer.apply_chat_template(messages, return_dict=False) == maker.renderer.render_ids(
        messages
    )


def test_a_training_episode_is_a_chain_of_unchanged_prefixes(maker):
    episode = maker.make("37 times 85", "echo $((37*85))", "3145", "3145")
    text = maker.tokenizer.decode(episode.token_ids)
    assert text == (
        "<|im_start|>user\n37 times 85<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "execute_bash", "arguments": {"command": "echo $((37*85))"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n3145\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n3145<|im_end|>"
    )
    ids = [t for t, sampled in zip(episode.token_ids, episode.sampled, strict=True) if sampled]
    assert ids == maker.tool_call_ids("echo $((37*85))") + maker.answer_ids("3145")


def test_the_renderer_parses_the_tool_call(maker):
    parsed = maker.renderer.parse_response(maker.tool_call_ids("echo $((37*85))"))
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [
        ("execute_bash", {"command": "echo $((37*85))"})
    ]


def test_the_committed_tokenizer_is_the_one_the_code_makes(maker):
    assert tokenizer.make_tokenizer().get_vocab() == maker.tokenizer.get_vocab()
    assert maker.end_of_turn == 321


def test_tasks_are_reproducible_and_their_answers_are_bashs():
    tasks = make_tasks(40, seed=3)
    assert tasks == make_tasks(40, seed=3) != make_tasks(40, seed=4)
    commands = []
    for task in tasks:
        a, word, b = parse_question(task["question"])
        commands.append(bash_command(a, OPERATORS[word][0], b))
    done = subprocess.run(["bash", "-c", "\n".join(commands)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [task["answer"] for task in tasks]


def test_the_score_reads_the_last_number():
    assert score("3145", "3145") == 1.0
    assert score("37*85 = 3145.", "3145") == 1.0
    assert score("-12", "12") == 0.0
    assert score("no idea", "12") == 0.0


def test_the_task_writer_writes_json_lines(tmp_path):
    target = tmp_path / "tasks.jsonl"
    command = [sys.executable, "-m", "examples.demo_model.make_tasks", "-n", "7", "-o", str(target)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert [json.loads(line) for line in target.read_text().splitlines()] == make_tasks(7, seed=0)
