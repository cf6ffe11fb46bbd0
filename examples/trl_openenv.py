"""TRL's GRPOTrainer on a game of ours, through `msgrpo env serve`: nano, two updates.

    python3 -m venv .venv-trl
    .venv-trl/bin/python -m pip install torch==2.13.0
    .venv-trl/bin/python -m pip install trl==1.16.0 openenv==0.10.0 -e '.[train]'
    .venv-trl/bin/msgrpo env serve frozen-lake --port 8000 &
    .venv-trl/bin/python examples/trl_openenv.py --url http://127.0.0.1:8000

TRL plays an environment as tool calls in one conversation that grows: the model reads all of its earlier turns,
while in MS-GRPO every prompt is built from the current state alone. nano was built for the latter, so this shows
that the two fit together and nothing about how well they learn. nano writes no JSON; the two templates below let TRL
read `<action>right</action>` as the call move(action="right"). A model with tool calls of its own needs neither.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from datasets import Dataset
from openenv.core import GenericEnvClient
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from msgrpo.games import get_scenario
from msgrpo.models.paths import base_path
from msgrpo.prompt import PromptTemplate

SCENARIO = "frozen-lake"
TALK = """{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}{% if call.function.name == 'move' -%}
<action>{{ call.function.arguments.action }}</action>{% else %}{{ call.function | tojson }}{% endif %}{% endfor -%}
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
READ = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<action>",
            "close_pattern": r"</action>\s*",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "move", "arguments": {"action": "{content}"}}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def environment(url: str) -> Any:
    """What TRL's `environment_factory` makes one of for every rollout."""

    class Environment:
        steps = 0  # of all rollouts, which this script prints

        def __init__(self) -> None:
            self._client = GenericEnvClient(base_url=url).sync()
            self._return = 0.0

        def reset(self, index: int = 0, **row: Any) -> str:
            self._return = 0.0
            return str(self._client.reset(scenario=SCENARIO, split="train", index=index).observation["text"])

        def move(self, action: str) -> str:
            """Play one move.

            Args:
                action: up, down, left or right.
            """
            result = self._client.step({"action": action})
            self._return += result.reward or 0.0
            Environment.steps += 1
            return "The game is over." if result.done else "State: " + str(result.observation["text"])

        def get_reward(self) -> float:
            return self._return

    return Environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--updates", type=int, default=2)
    given = parser.parse_args()
    path = base_path("nano")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template, tokenizer.response_template = TALK, READ
    rules = PromptTemplate().render(get_scenario(SCENARIO), "").prefix
    rows = [{"prompt": [{"role": "user", "content": rules}], "index": index} for index in range(16)]
    factory = environment(given.url)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(path, dtype="float32"),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=given.updates,
                num_generations=8,
                per_device_train_batch_size=16,
                max_completion_length=1000,
                max_tool_calling_iterations=8,
                learning_rate=1e-3,
                beta=0.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            environment_factory=factory,
        )
        trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            names = ("step", "reward", "reward_std", "tools/call_frequency", "tools/failure_frequency")
            print({name: entry[name] for name in names if name in entry})
    print(f"{trainer.state.global_step} updates, {factory.steps} moves played on the server")


if __name__ == "__main__":
    main()
