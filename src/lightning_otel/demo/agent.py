"""The demo's agent: a plain ``openai`` tool loop that knows nothing of lightning-otel."""

import ast
import json
import operator
from collections.abc import Mapping
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Work out an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
_SYSTEM = "You are a careful assistant. Use the calculator, then answer with the number."
_MOST_TURNS = 4
_OPERATORS: Mapping[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def solve(client: Any, question: str) -> str:
    """Answer a question with the model behind an ``openai.OpenAI`` client."""
    messages: list[Any] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": question},
    ]
    for _ in range(_MOST_TURNS):
        reply = client.chat.completions.create(
            model="toy-policy",
            messages=messages,
            tools=TOOLS,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        answer = reply.choices[0].message
        if not answer.tool_calls:
            return answer.content or ""
        messages.append(
            answer.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        )
        for call in answer.tool_calls:
            expression = json.loads(call.function.arguments)["expression"]
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": str(calculate(expression))}
            )
    return ""


def calculate(expression: str) -> int:
    """The value of a sum, difference or product of whole numbers.

    Raises:
        ValueError: The text is anything else.
    """
    return _evaluate_node(ast.parse(expression, mode="eval").body)


def _evaluate_node(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result: int = _OPERATORS[type(node.op)](
            _evaluate_node(node.left), _evaluate_node(node.right)
        )
        return result
    raise ValueError(f"not a sum, difference or product: {ast.unparse(node)}")
