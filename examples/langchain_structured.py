"""LangChain models with tools bound and with structured output, one of them invalid."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


@tool
def calculator(expression: str) -> int:
    """Work out a sum."""
    left, right = expression.split("+")
    return int(left) + int(right)


class Place(BaseModel):
    """A place on Earth."""

    city: str
    is_big: bool


class Score(BaseModel):
    """How good it was."""

    points: int = Field(ge=50)


model = ChatOpenAI(model="toy", logprobs=True, extra_body={"return_token_ids": True})

if __name__ == "__main__":
    print(model.with_structured_output(Place).invoke("Name a city."))
    by_tool = model.with_structured_output(Place, method="function_calling")
    print(by_tool.invoke("Name a 'Rome' or another place."))
    checked = model.with_structured_output(Score, include_raw=True)
    try:
        print(checked.invoke("Score it.")["parsing_error"])
    except ValueError as problem:
        print("invalid:", type(problem).__name__)

    question = "What is 20+22?"
    message = model.bind_tools([calculator]).invoke(question)
    results = [calculator.invoke(call) for call in message.tool_calls]
    print([result.content for result in results])
    print(model.invoke([("user", question), message, *results]).text)
