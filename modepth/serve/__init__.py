"""A server: continuous batching (`engine`), apart from it HTTP in the manner of OpenAI (`http`). Extra: `serve`."""
