"""The embedded LLM backend: vLLM's wire format in token ids, on transformers, for machines without vLLM.

`python -m services.inference --model DIR` serves one model. Torch is imported only by the modules of this
package, so the rest of the service runs without it.
"""
