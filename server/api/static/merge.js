// One conversation that two tabs have changed: nothing that either of them has is lost.

const ENDED = ["done", "stopped", "failed", "edited"];

/**
 * Whether a message's state is later than another state of it. Only the tab in which an answer comes changes it: each
 * continuation counts in turn, and while it comes, beat is the time of the last save.
 */
function isLater(state, other) {
  const [turn, before] = [state.turn ?? 0, other.turn ?? 0];
  if (turn !== before) return turn > before;
  const ended = ENDED.includes(other.state);
  if (ended !== ENDED.includes(state.state)) return !ended;
  return !ended && (state.beat ?? 0) > (other.beat ?? 0);
}

function replace(message, state) {
  for (const name of Object.keys(message)) if (!(name in state)) delete message[name];
  Object.assign(message, state);
}

function isBelow(conversation, id, ancestor) {
  const parents = new Map(conversation.messages.map((one) => [one.id, one.parent]));
  while (id !== undefined && id !== null && id !== ancestor) id = parents.get(id);
  return id === ancestor;
}

/**
 * Take into a conversation what another state of it has more. Its branch goes on where the other one's does, if follow is
 * set. Returns {added, changed}: whether there are other messages now, and those that are different.
 */
export function merge(conversation, other, follow = false) {
  const mine = new Map(conversation.messages.map((one) => [one.id, one]));
  const removed = new Set([...(conversation.removed ?? []), ...(other.removed ?? [])]);
  const changed = [];
  const count = mine.size;
  for (const state of other.messages) {
    const message = mine.get(state.id);
    if (!message) mine.set(state.id, state);
    else if (isLater(state, message)) {
      replace(message, state);
      changed.push(message);
    }
  }
  const added = mine.size > count || [...removed].some((id) => mine.has(id));
  if (added) {
    const kept = [...mine.values()].filter((one) => !removed.has(one.id));
    conversation.messages = kept.sort((a, b) => (a.created ?? 0) - (b.created ?? 0));
  }
  if (removed.size) conversation.removed = [...removed];
  if ((other.edited ?? 0) > (conversation.edited ?? 0)) {
    const { title, settings, edited } = other;
    Object.assign(conversation, { title, settings, edited });
  }
  conversation.updated = Math.max(conversation.updated, other.updated);
  const gone = removed.has(conversation.leaf);
  if (gone || (follow && isBelow(conversation, other.leaf, conversation.leaf))) conversation.leaf = other.leaf;
  return { added, changed };
}
