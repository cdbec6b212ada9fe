// What users of Vercel's AI SDK write, as asks.py has it for Python: URL, URL of a calling model.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

globalThis.AI_SDK_LOG_WARNINGS = false; // they go to the standard output
const [url, callsUrl] = process.argv.slice(2);
const models = (base) => {
  const options = { baseURL: `${base}/v1`, apiKey: 'x' };
  return {
    chat: createOpenAICompatible({ name: 'tandem', ...options })('fake'),
    response: createOpenAI(options)('fake'),
    message: createAnthropic(options)('fake'),
  };
};
const weather = tool({
  description: 'of a city',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `fine in ${city}`,
});

const answers = [];
const ask = async (what, run) => {
  try {
    answers.push([what, true, String(await run())]);
  } catch (error) {
    answers.push([what, false, `${error}: ${error.responseBody ?? ''}`]);
  }
};
const streamed = async (options) => {
  let failure;
  const stream = streamText({ ...options, onError: ({ error }) => { failure = error; } });
  for await (const _ of stream.fullStream);
  if (failure) throw failure;
  return stream;
};

for (const kind of Object.keys(models(url))) {
  const plain = { model: models(url)[kind], prompt: 'hi', maxRetries: 0 };
  const calling = { model: models(callsUrl)[kind], prompt: 'hi', maxRetries: 0, tools: { weather }, stopWhen: stepCountIs(2) };
  await ask(kind, async () => (await generateText(plain)).text);
  await ask(`${kind}, streamed`, async () => (await streamed(plain)).text);
  const shown = (steps) => [...steps[0].toolResults.map((result) => result.output), steps.at(-1).text];
  await ask(`${kind}, with a tool`, async () => shown((await generateText(calling)).steps));
  await ask(`${kind}, with a tool, streamed`, async () => shown(await (await streamed(calling)).steps));
}
process.stdout.write(JSON.stringify(answers));
