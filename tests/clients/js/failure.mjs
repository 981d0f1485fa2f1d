// A stream that ends in an error: what the `ai` package tells of it, as JSON.
// usage: node failure.mjs BASE_URL QUESTION

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";

const [baseURL, prompt] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "tailrace", baseURL })("replay");
const errors = [];
const onError = ({ error }) => errors.push(typeof error === "string" ? error : JSON.stringify(error.message ?? error));
let text = "";
for await (const part of streamText({ model, prompt, maxRetries: 0, onError }).fullStream) {
  if (part.type === "text-delta") text += part.text;
}
console.log(JSON.stringify({ text, errors }));
