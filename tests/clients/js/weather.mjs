// The `ai` package with its OpenAI-compatible provider in a conversation with a tool. Prints what it understood as JSON.
// usage: node weather.mjs BASE_URL QUESTION WEATHER     WEATHER: a JSON object, city -> what the tool says of it

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, question, weather] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "tailrace", baseURL, includeUsage: true });
const calls = [];
const settings = {
  model: provider("replay"),
  maxRetries: 0,
  system: "Be brief.",
  prompt: question,
  stopWhen: stepCountIs(4),
  tools: {
    get_weather: tool({
      description: "Weather of a city.",
      inputSchema: z.object({ city: z.string(), days: z.number().int() }),
      execute: async (input) => {
        calls.push(input);
        return JSON.parse(weather)[input.city];
      },
    }),
  },
};

function said(step) {
  return {
    reasoning: step.reasoningText ?? "",
    text: step.text,
    calls: step.toolCalls.map((call) => ({ id: call.toolCallId, name: call.toolName, input: call.input })),
    results: step.toolResults.map((result) => result.output),
    finish: step.finishReason,
    usage: step.usage,
  };
}

async function stream() {
  const errors = [];
  const result = streamText({ ...settings, onError: ({ error }) => errors.push(String(error)) });
  const parts = [];
  for await (const part of result.fullStream) {
    parts.push({ type: part.type, id: part.id ?? part.toolCallId, text: part.text ?? part.delta ?? "" });
  }
  return { steps: (await result.steps).map(said), parts, errors, calls: calls.splice(0) };
}

async function whole() {
  const result = await generateText(settings);
  return { steps: result.steps.map(said), text: result.text, calls: calls.splice(0) };
}

console.log(JSON.stringify({ stream: await stream(), whole: await whole() }));
