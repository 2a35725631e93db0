"""Structured output: parsed into pydantic models, by both APIs; one answer fails validation."""

from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field, ValidationError


class Step(BaseModel):
    text: str
    is_done: bool


class Plan(BaseModel):
    title: str
    urgency: Literal["low", "middle", "high"]
    first: Step


class Grown(BaseModel):
    name: str
    age: int = Field(ge=18)


if __name__ == "__main__":
    client = OpenAI()
    question = [{"role": "user", "content": "Plan my week, with high urgency."}]

    chat = client.chat.completions.parse(
        model="toy",
        messages=question,
        response_format=Plan,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    print(chat.choices[0].message.parsed)

    response = client.responses.parse(model="toy", input=question, text_format=Plan)
    print(response.output_parsed)

    try:
        client.chat.completions.parse(model="toy", messages=question, response_format=Grown)
    except ValidationError as problem:
        print(problem.error_count(), "problem:", problem.errors()[0]["loc"])
