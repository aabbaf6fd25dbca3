// Where somebody who has no session gives a key, once.
import { html, useState, Command, Failure } from "../ui.js";
import { signIn } from "../api.js";

export function LoginView({ onSignedIn }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const enter = async (event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      onSignedIn(await signIn(key.trim()));
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  };
  return html`<main class="login" id="main" tabindex="-1">
    <form class="card login-card" onSubmit=${enter}>
      <h1><span class="logo" aria-hidden="true">r</span> rollout</h1>
      <p class="lead">See every rollout, token by token, live. This page needs a key of the service, once.</p>
      <label for="key">API key</label>
      <input id="key" type="password" name="key" autocomplete="off" spellcheck="false" placeholder="rlt_…" required
        autofocus value=${key} onInput=${(event) => setKey(event.target.value)} />
      <button type="submit" class="button primary" disabled=${busy || !key.trim()}>${busy ? "Signing in …" : "Sign in"}</button>
      ${error && (error.status === 401
        ? html`<p class="wrong" role="alert">The service does not know this key, or it was revoked.</p>`
        : html`<${Failure} error=${error} />`)}
      <h2>Where is the key?</h2>
      <dl class="where">
        <dt>Started with <code>rollout up</code>, on this machine</dt><dd><${Command}>cat .local/run/api.key<//></dd>
        <dt>You run the service for others</dt><dd><${Command}>rollout keys create NAME --scope read<//></dd>
        <dt>Somebody else runs it</dt><dd>Ask them for a key with the scope <code>read</code>; to cancel it takes <code>submit</code>.</dd>
      </dl>
      <p class="quiet small">The key is exchanged for a session of 12 hours. It is kept neither in the page nor in an address.</p>
    </form>
  </main>`;
}
