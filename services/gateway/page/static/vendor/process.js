// virtual-core asks for Node's process.env; imported before it, this answers. Ours, not vendored.
globalThis.process ??= { env: { NODE_ENV: "production" } };
export {};
