// A list of rollouts that is asked for answer by answer: with filters one may bring few rollouts, or none.
import { useEffect, useReducer, useRef, useState } from "../ui.js";
import { get } from "../api.js";

/**
 * Rollouts that fit `filters`, the newest first, from `cursor` on; asked for `limit` at a time, until there are `most`,
 * or `scans` answers are there. `looked`: at how many the service has looked for them; null = at all that there are.
 */
export function useListing(filters, { cursor = null, limit, most = Infinity, scans }) {
  const [turn, again] = useReducer((n) => n + 1, 0);
  const key = JSON.stringify([filters, cursor, turn]);
  const begun = { key, rows: [], next: cursor, looked: 0, error: null, loading: true };
  const [page, setPage] = useState(begun);
  const current = useRef(); // what is still wanted when an answer comes

  async function scan({ rows, next }) {
    try {
      for (let i = 1; i <= scans; i++) {
        const answer = await get("/v1/rollouts", { ...filters, limit: Math.min(limit, most - rows.length), cursor: next });
        if (current.current !== key) return;
        rows = [...rows, ...answer.rollouts];
        next = answer.cursor;
        const done = i === scans || rows.length >= most || next === null;
        const looked = next === null ? null : Number(next) - Number(cursor ?? 0);
        setPage({ key, rows, next, looked, error: null, loading: !done });
        if (done) return;
      }
    } catch (error) {
      if (current.current === key) setPage((old) => ({ ...old, rows, error, loading: false }));
    }
  }
  useEffect(() => {
    current.current = key;
    setPage((old) => ({ ...begun, rows: old.rows })); // the old rows stay until the new are there
    scan(begun);
    return () => {
      current.current = null;
    };
  }, [key]);
  return {
    ...page,
    again,
    more: () => {
      setPage((old) => ({ ...old, loading: true, error: null }));
      scan(page);
    },
    update: (change) => setPage((old) => ({ ...old, rows: old.rows.map(change) })),
  };
}
