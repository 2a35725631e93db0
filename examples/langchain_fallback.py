"""Models that fail: retried by the client, retried by LangChain, and replaced by another one."""

from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from openai import InternalServerError

toy = ChatOpenAI(model="toy", max_retries=0)
broken = ChatOpenAI(model="fail-500", max_retries=0)
flaky = ChatOpenAI(model="flaky-500", max_retries=2)

tries = []


def sometimes(text):
    """The broken model at the first try, the good one from then on."""
    tries.append(text)
    return broken if len(tries) == 1 else toy


if __name__ == "__main__":
    print(flaky.invoke("Once more.").text)

    safe = broken.with_fallbacks([toy])
    print([reply.text for reply in safe.batch(["One.", "Two.", "Three."])])

    stubborn = RunnableLambda(sometimes).with_retry(
        retry_if_exception_type=(InternalServerError,),
        wait_exponential_jitter=False,
        stop_after_attempt=3,
    )
    print(stubborn.invoke("Try hard.").text)

    found = (broken | (lambda reply: reply.text)).batch(["Four."], return_exceptions=True)
    print([type(problem).__name__ for problem in found])
