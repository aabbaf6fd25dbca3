// A list of which only what is seen is in the document. The page scrolls, not the list.
import "../vendor/process.js";
import { Virtualizer, observeWindowOffset, observeWindowRect, windowScroll } from "../vendor/virtual-core/index.js";
import { html, useEffect, useLayoutEffect, useReducer, useRef, useState } from "../ui.js";

const ABOVE = 64;
/** Pixels at the page's top that stick, and may not cover what was scrolled to. */
const NEAR_END = 120;
const toEnd = () => window.scrollTo(0, document.documentElement.scrollHeight);

/**
 * `items` with a `key` each, of which `render(item)` makes what is seen. `handle.current(index)` scrolls to one.
 * `follow` stays at the end while items come and grow, as long as the reader is there.
 */
export function VirtualList({ items, render, estimate, label, handle, follow = false }) {
  const [list, made, latest] = [useRef(), useRef(), useRef()];
  const [atEnd, setAtEnd] = useState(false);
  const [margin, setMargin] = useState(0);
  const [, redraw] = useReducer((n) => n + 1, 0);
  latest.current = items;
  const options = {
    count: items.length,
    scrollMargin: margin,
    scrollPaddingStart: ABOVE,
    overscan: 6,
    getScrollElement: () => window,
    observeElementRect: observeWindowRect,
    observeElementOffset: observeWindowOffset,
    scrollToFn: windowScroll,
    initialOffset: () => window.scrollY,
    getItemKey: made.current?.options.getItemKey ?? ((index) => latest.current[index]?.key ?? index),
    estimateSize: (index) => estimate(latest.current[index]),
    onChange: redraw,
  };
  if (made.current) made.current.setOptions(options);
  else made.current = new Virtualizer(options);
  const virtual = made.current;
  if (handle) handle.current = (index) => virtual.scrollToIndex(index, { align: "start" });

  // The two calls by which each of the library's own adapters binds it to a component's life.
  useLayoutEffect(() => virtual._didMount(), []);
  useLayoutEffect(() => virtual._willUpdate());
  useLayoutEffect(() => {
    const top = Math.round(list.current.getBoundingClientRect().top + window.scrollY);
    if (Math.abs(top - margin) > 1) setMargin(top);
  });
  useEffect(() => {
    const look = () => {
      setAtEnd(window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - NEAR_END);
    };
    look();
    window.addEventListener("scroll", look, { passive: true });
    return () => window.removeEventListener("scroll", look);
  }, []);
  useLayoutEffect(() => {
    if (follow && atEnd) toEnd();
  });

  const seen = virtual.getVirtualItems();
  return html`${follow && !atEnd && html`<button type="button" class="button to-end" onClick=${toEnd}>↓ Follow</button>`}
  <div class="virtual" role="list" aria-label=${label} ref=${list} style=${{ height: `${virtual.getTotalSize()}px` }}>
    ${seen.map((place) => {
      const item = items[place.index];
      if (!item) return null;
      return html`<div class="virtual-item" role="listitem" key=${place.key} data-index=${place.index}
        aria-setsize=${items.length} aria-posinset=${place.index + 1} ref=${virtual.measureElement}
        style=${{ transform: `translateY(${place.start - margin}px)` }}>${render(item, place.index)}</div>`;
    })}
  </div>`;
}
