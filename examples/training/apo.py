"""A prompt that gets better by itself, offline and in seconds: python examples/training/apo.py

The model is scripted, behind a real HTTP server: the clerk knows capitals and does what its
instructions say, the writer turns hints that it reads into instructions. Nobody but the agent,
which judges each answer, knows how answers are to be written.
"""

import re
import sys
import tempfile

import openai

import lightning_otel as lo
from lightning_otel.algorithms import APO
from lightning_otel.demo.policy import Reply
from lightning_otel.demo.server import DemoServer
from lightning_otel.trainer import Trainer

CAPITALS = {
    "France": "Paris",
    "Norway": "Oslo",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
    "Ghana": "Accra",
    "Nepal": "Kathmandu",
    "Chile": "Santiago",
    "India": "Delhi",
    "Iran": "Tehran",
    "Qatar": "Doha",
    "Latvia": "Riga",
}
STYLES = {"in capitals": str.upper, "with a full stop": lambda text: text.rstrip(".") + "."}
SEED = "Answer questions about countries."


class Model:
    """Both models: the one that answers, and the one that writes prompts."""

    def reply(self, body, rng):
        *_, asked = (message["content"] for message in body["messages"])
        if body["model"] == "writer":
            return Reply(text=self.rewritten(asked, rng))
        system = body["messages"][0]["content"]
        country = next((name for name in CAPITALS if name in asked), "")
        text = CAPITALS.get(country, "I do not know")
        for style, write in STYLES.items():
            text = write(text) if style in system else text
        return Reply(text=text)

    def rewritten(self, asked, rng):
        current = asked.split("```")[1].strip()
        hints = sorted(set(re.findall(r"Hint: (.*)", asked)))
        return f"```\n{current} {rng.choice(hints)}\n```" if hints else ""


def agent_of(client):
    """An agent that asks the clerk, and says what its answer is worth, and why."""

    def agent(task, resources):
        reply = client.chat.completions.create(
            model="clerk",
            messages=[
                {"role": "system", "content": resources["system_prompt"].format()},
                {"role": "user", "content": f"What is the capital of {task['country']}?"},
            ],
        )
        said = reply.choices[0].message.content
        missed = [style for style, write in STYLES.items() if write(said) != said]
        for style in missed:
            lo.emit_message(f"Hint: Write the answer {style}.")
        is_right = CAPITALS[task["country"]].lower() in said.lower()
        return is_right * (1 - len(missed) / len(STYLES))

    return agent


def tasks():
    """Tasks to learn from, to choose by, and to judge by in the end."""
    found = [{"country": country} for country in CAPITALS]
    return found[:5], found[5:13], found[13:]


def main(folder):
    train, val, test = tasks()
    with (
        DemoServer(Model()) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none") as client,
    ):
        trainer = Trainer(
            agent_of(client),
            APO(model="writer", base_url=server.base_url, num_candidates=6),
            store=lo.Store(f"{folder}/traces.duckdb"),
            resources={"system_prompt": SEED},
        )
        before = trainer.evaluate(test)
        trainer.fit(train, val)
        after = trainer.evaluate(test)
    print(f"on tasks never seen: {before.reward:.2f} -> {after.reward:.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
