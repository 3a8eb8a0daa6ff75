"""HTTP and text: the OpenAI and SGLang-native APIs in front of verify services. Never imports torch."""
