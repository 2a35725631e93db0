"""Every attribute key, span name and well-known value that lightning-otel writes or reads.

Keys of foreign conventions stand in their readers. Three families:

- ``gen_ai.*``: the OpenTelemetry GenAI semantic conventions, copied as literals because the
  constants of ``opentelemetry-semantic-conventions`` are all marked deprecated.
  Source: the ``semantic-conventions-genai`` repository of open-telemetry, schema 1.42.
- ``agentlightning.*``: Agent Lightning 0.3's keys, spelled as in its ``semconv.py``.
- ``lightning.*``: what neither names, above all token ids and logprobs.
"""

from typing import Final

SCOPE: Final = "lightning_otel"
"""Instrumentation scope of every span this package makes."""

# --- gen_ai: the operation -----------------------------------------------------------------------
OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
AGENT_NAME: Final = "gen_ai.agent.name"
AGENT_ID: Final = "gen_ai.agent.id"
AGENT_DESCRIPTION: Final = "gen_ai.agent.description"
WORKFLOW_NAME: Final = "gen_ai.workflow.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
OUTPUT_TYPE: Final = "gen_ai.output.type"

CHAT: Final = "chat"
TEXT_COMPLETION: Final = "text_completion"
GENERATE_CONTENT: Final = "generate_content"
EMBEDDINGS: Final = "embeddings"
EXECUTE_TOOL: Final = "execute_tool"
EXECUTE_TASK: Final = "execute_task"
"""Not in the conventions: a step of a workflow that is given to an agent, as CrewAI's tasks are."""
EXECUTE_NODE: Final = "execute_node"
"""Not in the conventions, which allow others: a node of a graph, such as LangGraph's."""
INVOKE_AGENT: Final = "invoke_agent"
CREATE_AGENT: Final = "create_agent"
INVOKE_WORKFLOW: Final = "invoke_workflow"
RETRIEVAL: Final = "retrieval"
RETRIEVE_RESPONSE: Final = "retrieve_response"
"""Not in the conventions: a look at a response that the server made in the background."""
CREATE_CONVERSATION: Final = "create_conversation"
"""Not in the conventions, as the next: what a program puts into a history on the server."""
UPDATE_CONVERSATION: Final = "update_conversation"

GENERATIVE_OPERATIONS: Final = frozenset({CHAT, TEXT_COMPLETION, GENERATE_CONTENT})
"""Operations whose answer is an action: these calls become transitions."""
CALL_OPERATIONS: Final = GENERATIVE_OPERATIONS | {EMBEDDINGS}
"""Operations that are a request to a model."""

# --- gen_ai: the request -------------------------------------------------------------------------
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_STOP: Final = "gen_ai.request.stop_sequences"
REQUEST_CHOICES: Final = "gen_ai.request.choice.count"
REQUEST_STREAM: Final = "gen_ai.request.stream"
REQUEST_ENCODING_FORMATS: Final = "gen_ai.request.encoding_formats"
REQUEST_REASONING_LEVEL: Final = "gen_ai.request.reasoning.level"
PROMPT_ID: Final = "openai.request.prompt.id"
PROMPT_VERSION: Final = "openai.request.prompt.version"
PROMPT_VARIABLES: Final = "openai.request.prompt.variables"
PROMPT_MESSAGES: Final = "openai.response.prompt.messages"
"""A prompt that the server stores, as it rendered it with the variables: JSON messages."""
REQUEST_PREVIOUS_RESPONSE: Final = "gen_ai.request.previous_response.id"
REQUEST_CONVERSATION: Final = "openai.request.conversation.id"
"""The history on the server that a request goes on from."""
REQUEST_BACKGROUND: Final = "openai.request.background"
"""True on a call whose answer the server makes in the background."""
EMBEDDING_DIMENSIONS: Final = "gen_ai.embeddings.dimension.count"

# --- gen_ai: the response ------------------------------------------------------------------------
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
"""Seconds from the request to the first byte of a streamed body."""
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
CACHE_CREATION_TOKENS: Final = "gen_ai.usage.cache_creation.input_tokens"
REASONING_TOKENS: Final = "gen_ai.usage.reasoning.output_tokens"

# --- gen_ai: content (opt-in on spans that leave the machine) ------------------------------------
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_DESCRIPTION: Final = "gen_ai.tool.description"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
RETRIEVAL_QUERY: Final = "gen_ai.retrieval.query.text"
RETRIEVAL_DOCUMENTS: Final = "gen_ai.retrieval.documents"

# --- gen_ai: evaluations -------------------------------------------------------------------------
EVENT_EVALUATION: Final = "gen_ai.evaluation.result"
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
EVALUATION_EXPLANATION: Final = "gen_ai.evaluation.explanation"

# --- gen_ai: metrics -----------------------------------------------------------------------------
METRIC_DURATION: Final = "gen_ai.client.operation.duration"
METRIC_TOKENS: Final = "gen_ai.client.token.usage"
TOKEN_TYPE: Final = "gen_ai.token.type"

# --- openai, server, error -----------------------------------------------------------------------
OPENAI_API: Final = "openai.api.type"
OPENAI_REQUEST_TIER: Final = "openai.request.service_tier"
OPENAI_RESPONSE_TIER: Final = "openai.response.service_tier"
OPENAI_FINGERPRINT: Final = "openai.response.system_fingerprint"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
RESENDS: Final = "http.request.resend_count"
ERROR_TYPE: Final = "error.type"
PLUMBING_KEYS: Final = (
    "http.method",
    "http.request.method",
    "http.route",
    "db.system",
    "db.system.name",
    "rpc.system",
    "messaging.system",
)
"""A span with one of these tells of a request, query or message that carries what agents do."""
EVENT_EXCEPTION: Final = "exception"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"
EXCEPTION_ESCAPED: Final = "exception.escaped"

# --- lightning: what no convention names ---------------------------------------------------------
PROMPT_TOKEN_IDS: Final = "lightning.prompt.token_ids"
"""Token ids the server was given, base64 of little-endian int32, [P]."""
RESPONSE_TOKEN_IDS: Final = "lightning.response.token_ids"
"""Token ids the server sampled, base64 of little-endian int32, [R]; one a choice, comma-joined."""
RESPONSE_LOGPROBS: Final = "lightning.response.logprobs"
"""Log-probability of each sampled token, base64 of little-endian float64, [R]; one per choice."""
LOGPROB_TOKEN_IDS: Final = "lightning.response.logprob_token_ids"
"""The id beside each logprob, packed as token ids, [R], where the server names tokens by id."""
LOGPROBS_MODE: Final = "lightning.logprobs.mode"
"""``raw`` or ``processed``: before or after temperature and truncation; also of the resource."""
REQUEST_MIN_P: Final = "lightning.request.min_p"
REQUEST_REPETITION_PENALTY: Final = "lightning.request.repetition_penalty"
ABANDONED: Final = "lightning.abandoned"
"""True on a call whose stream the program left before the end."""
RETRIEVED_RESPONSE: Final = "lightning.retrieved.response.id"
"""Id of the response that was looked at; not the response id, by which a reward names a call."""
UNREAD_ANSWER: Final = "lightning.response.unread"
"""The text of an answer that is neither JSON nor a stream of events, as it came."""
FAILED_ATTEMPTS: Final = "lightning.failed_attempts"
"""Attempts before the last at one request: status or exception, and the wait after it, as JSON."""
SUPPRESSED: Final = "lightning.suppressed"
"""A span of a program that suppressed instrumentation there: for the store alone."""
EXECUTED: Final = "lightning.process.executed"
"""Id of the program that a recorded process executed, on all that is recorded of it."""
FRAMEWORK: Final = "lightning.framework"
"""Library of agents that a process had imported when it called a model."""
SESSION: Final = "lightning.session"
"""True on a span around a whole run, below which some tracers put calls beside their agents."""
HANDOFF_TARGET: Final = "lightning.handoff.target"
"""Name of the agent that an agent handed the conversation to."""
GUARDRAIL_NAME: Final = "lightning.guardrail.name"
"""Name of a check of what goes into an agent or comes out of it."""
GUARDRAIL_TRIGGERED: Final = "lightning.guardrail.triggered"
"""Whether the check objected."""
STOP_REASON: Final = "lightning.stop_reason"
"""Why a team of agents stopped, in its own words."""
CUT: Final = "lightning.cut"
"""JSON object: for each value too large to keep whole, its length and the kept part's SHA-256."""
REDACTED: Final = "lightning.redacted"
"""What was taken out of a span after it was kept: the redaction, and how many values by reason."""
RECEIVED: Final = "lightning.received"
"""How a span that was not recorded here came: ``otlp:PEER``, ``otlp+token:PEER`` or ``import``."""
SENT_TIMES: Final = "lightning.sent_times"
"""JSON list: start and end in ns as they were sent, if a span cannot have them."""
WORKFLOW_STEP: Final = "lightning.workflow.step"
"""Name of the workflow's step, such as a task, that an agent is working on."""
TRACK_ONLY: Final = "lightning.track_only"
"""Agents whose calls become training data: names, globs or ``re:…``; absent means all."""
RESOURCE_VERSION: Final = "lightning.resource.version"
"""Version of the resource (prompt, model, weights) that produced the call."""
MODE: Final = "lightning.mode"
"""What the rollout is for: ``train``, ``val``, ``test``, or any other word."""
RESOURCES: Final = "lightning.resources"
"""JSON object: by name, glob or ``re:…`` of agents an object of each resource's version."""

# --- agentlightning: rollouts, rewards and marks, as Agent Lightning 0.3 spells them --------------
ROLLOUT_ID: Final = "agentlightning.rollout_id"
ATTEMPT_ID: Final = "agentlightning.attempt_id"
SEQUENCE_ID: Final = "agentlightning.span_sequence_id"

REWARD_PREFIX: Final = "agentlightning.reward"
"""``agentlightning.reward.N.name|value``; N = 0 is the primary reward."""
REWARD_VALUE: Final = "agentlightning.reward.0.value"
REWARD_NAME: Final = "agentlightning.reward.0.name"
REWARD_STEPS: Final = "lightning.reward.steps"
"""JSON list: a number, or null, for each step in turn; the reward's value is then their sum."""
REWARD_PRIMARY: Final = "lightning.reward.primary"
"""True if the program declared its one number primary; of several the first one is."""
REWARD_FUNCTION: Final = "lightning.reward.function"
"""Name of the reward function that gave it."""
REWARD_VERSION: Final = "lightning.reward.version"
"""The function's version, where it is not the first."""
REWARD_SOURCE: Final = "lightning.reward.source"
"""The start of the SHA-256 of the function's source text."""
REWARD_PROMPT: Final = "lightning.reward.prompt"
"""What a chat model was asked by for it: a rubric."""
REWARD_AUTHOR: Final = "lightning.reward.author"
"""Who gave it, by the name or id that a platform has for them."""
REWARD_AUTHOR_KIND: Final = "lightning.reward.author_kind"
"""Of what kind they are, in the platform's word: ``ANNOTATION``, ``EVAL``, ``HUMAN``, ``LLM`` …"""
REWARD_RETRACTED: Final = "lightning.reward.retracted"
"""Marks an annotation that retracts a reward: the one whose span it is linked to."""
FEEDBACK_ID: Final = "lightning.feedback.id"
"""The id that whoever sent feedback gave it."""
FEEDBACK_QUALITY: Final = "lightning.feedback.quality_score"
FEEDBACK_RATING: Final = "lightning.feedback.rating"
FEEDBACK_SATISFIED: Final = "lightning.feedback.satisfied"
FEEDBACK_USED: Final = "lightning.feedback.used_result"
FEEDBACK_TEXT: Final = "lightning.feedback.text"
FEEDBACK_METADATA: Final = "lightning.feedback.metadata"
"""What else was sent with feedback, as JSON text."""
FEEDBACK_CONVERSATION: Final = "lightning.feedback.conversation"
"""The conversation that was judged; the reward is linked to a call of it."""
PRIMARY_REWARD: Final = "primary"
LINK_PREFIX: Final = "agentlightning.link"
"""``agentlightning.link.N.key_match|value_match``: the span whose attribute equals the value."""
LINK_VALUE: Final = f"{LINK_PREFIX}.0.value_match"
"""The value of its first link: of a reward, what it judges."""
LINK_SPAN_ID: Final = "span_id"
"""A link's key for a span's own id, which is no attribute."""
LINK_TRACE_ID: Final = "trace_id"
"""A link's key for a span's trace."""
TAG_PREFIX: Final = "agentlightning.tag"

MESSAGE_BODY: Final = "agentlightning.message.body"
OBJECT_TYPE: Final = "agentlightning.object.type"
OBJECT_LITERAL: Final = "agentlightning.object.literal"
OBJECT_JSON: Final = "agentlightning.object.json"
OPERATION_NAME: Final = "agentlightning.operation.name"
OPERATION_INPUT: Final = "agentlightning.operation.input"
OPERATION_OUTPUT: Final = "agentlightning.operation.output"
MARK_NAME: Final = "lightning.mark.name"
"""The name given to an action, observation or state that was marked by hand."""
TASK_ID: Final = "lightning.task.id"
TASK: Final = "lightning.task"
"""The rollout's task as JSON text."""

SPAN_ROLLOUT: Final = "agentlightning.rollout"
SPAN_ANNOTATION: Final = "agentlightning.annotation"
SPAN_OPERATION: Final = "agentlightning.operation"
SPAN_MESSAGE: Final = "agentlightning.message"
SPAN_OBJECT: Final = "agentlightning.object"
SPAN_EXCEPTION: Final = "agentlightning.exception"
SPAN_ACTION: Final = "lightning.action"
SPAN_OBSERVATION: Final = "lightning.observation"
SPAN_STATE: Final = "lightning.state"
SPAN_HANDOFF: Final = "handoff"
SPAN_GUARDRAIL: Final = "guardrail"

BODY_KEYS: Final = (
    INPUT_MESSAGES,
    OUTPUT_MESSAGES,
    SYSTEM_INSTRUCTIONS,
    TOOL_DEFINITIONS,
    PROMPT_TOKEN_IDS,
    RESPONSE_TOKEN_IDS,
    RESPONSE_LOGPROBS,
)
"""Large values with a column of their own in the store, in column order."""

CONTENT_KEYS: Final = frozenset(
    {
        *BODY_KEYS,
        LOGPROB_TOKEN_IDS,
        PROMPT_VARIABLES,
        PROMPT_MESSAGES,
        UNREAD_ANSWER,
        REQUEST_STOP,
        TOOL_ARGUMENTS,
        TOOL_RESULT,
        RETRIEVAL_QUERY,
        RETRIEVAL_DOCUMENTS,
        MESSAGE_BODY,
        OBJECT_LITERAL,
        OBJECT_JSON,
        OPERATION_INPUT,
        OPERATION_OUTPUT,
        MARK_NAME,
        WORKFLOW_STEP,
        TASK,
        STOP_REASON,
        EXCEPTION_MESSAGE,
        EXCEPTION_STACKTRACE,
        EVALUATION_EXPLANATION,
        FEEDBACK_TEXT,
        FEEDBACK_METADATA,
        REWARD_PROMPT,
    }
)
"""What people, models and tools said, and texts that may quote them: exceptions' above all."""
