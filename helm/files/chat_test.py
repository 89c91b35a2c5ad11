"""`helm test`: waits until every model is ready, then chats with each. Arguments: URL, seconds, model names."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

url, timeout_s, *models = sys.argv[1:]
headers = {"Content-Type": "application/json"}
if "REMORA_API_KEY" in os.environ:
    headers["Authorization"] = f"Bearer {os.environ['REMORA_API_KEY']}"
deadline_s = time.monotonic() + float(timeout_s)


def fetch(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


while True:
    try:
        fetch("/ready")
        break
    except (urllib.error.URLError, OSError) as error:
        if time.monotonic() >= deadline_s:
            sys.exit(f"not ready after {timeout_s} s: {error}")
        time.sleep(2)
for model in models:
    messages = [{"role": "user", "content": "Say hello."}]
    answer = json.loads(fetch("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 16}))
    text = answer["choices"][0]["message"]["content"]
    if not text.strip():
        sys.exit(f"{model} said nothing")
    sys.stdout.write(f"{model}: {text!r}\n")
