"""LiteLLM over the demo server, without its look-ups elsewhere."""

import os

# Read when LiteLLM is imported: it would fetch its list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
