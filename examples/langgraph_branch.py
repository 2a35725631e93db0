"""A LangGraph graph: a model node, a branch, and a node that calls openai itself."""

import asyncio
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from openai import OpenAI

model = ChatOpenAI(model="toy", logprobs=True, extra_body={"return_token_ids": True})
client = OpenAI()


class State(TypedDict, total=False):
    question: str
    draft: str
    answer: str


def draft(state):
    return {"draft": model.invoke(f"Draft an answer to: {state['question']}").text}


async def draft_async(state):
    parts = [part.text async for part in model.astream(f"Draft: {state['question']}")]
    return {"draft": "".join(parts)}


def is_short(state):
    return "polish" if len(state["draft"]) < 60 else "shorten"


def polish(state):
    reply = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": f"Polish: {state['draft']}"}]
    )
    return {"answer": reply.choices[0].message.content}


def shorten(state):
    reply = model.invoke([("user", f"Shorten: {state['draft']}")], max_tokens=4)
    return {"answer": reply.text}


def build(first):
    graph = StateGraph(State)
    graph.add_node("draft", first)
    graph.add_node(polish)
    graph.add_node(shorten)
    graph.add_edge(START, "draft")
    graph.add_conditional_edges("draft", is_short)
    graph.add_edge("polish", END)
    graph.add_edge("shorten", END)
    return graph.compile(name="writer")


if __name__ == "__main__":
    writer = build(draft)
    print(writer.invoke({"question": "Why?"})["answer"])
    print(writer.invoke({"question": "Why is there something rather than nothing at all?"}))
    print(asyncio.run(build(draft_async).ainvoke({"question": "How?"})))
