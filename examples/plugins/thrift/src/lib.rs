//! thrift: what goes is what is cheapest to compute again for the room it takes, less how long it has not been used.
//!
//! That is GreedyDual-Size (P. Cao, S. Irani, Cost-Aware WWW Proxy Caching Algorithms, USENIX Symposium on Internet
//! Technologies and Systems, 1997, after N. Young, The k-Server Dual and Loose Competitiveness for Paging, Algorithmica 11,
//! 1994): an entry is worth cost / size plus the worth that the last victim had when it was last used. So the worth of
//! what is not used stays while that of everything new rises, and age costs nothing to keep.
//!
//! Two things are a KV cache's own. The cost is that of prefill: a chunk's tokens attend to all before them, so that a
//! chunk at depth d costs 1 + d / double_at of a first one. And only leaves of the prefix tree go: a prompt is read from
//! its start up to the first chunk that is missing, so a chunk whose parent went is room wasted. Where every leaf is pinned,
//! others go after all: a policy that names nobody is not asked for long.
#![cfg_attr(target_arch = "wasm32", no_std)]

mod heap;

use heap::{Heap, Worth};
use kvhost::{alloc, op, Ask, Event, Evict, Info, Policy, NONE, SIZE_UNIT};

const COST: u64 = 1 << 10; // of a first chunk
const SCALE: u64 = 1 << 20; // worth of that cost in one unit of size is COST * SCALE

const RESIDENT: u8 = 1;
const PINNED: u8 = 2;
const NAMED: u8 = 4; // as a victim, since its last use
const TAKEN: u8 = 8; // off the heap for the time of one answer

const INNER: u64 = 1 << 63; // above the value of every leaf

#[derive(Clone, Copy)]
struct Slot {
    worth: Worth,
    parent: u32,
    parent_life: u32, // which of the parent slot's entries it was
    life: u32,        // counts the entries that the slot has held
    children: u32,    // resident ones
    size: u32,
    depth: u32,
    tenant: u32,
    state: u8,
}

// Integers only, of which all zeros are values.
unsafe impl kvhost::Zero for Slot {}

struct Thrift {
    slots: &'static mut [Slot],
    may_go: Heap,              // resident and not pinned; what has resident children after all leaves
    taken: &'static mut [u32], // off the heap for the time of one answer
    double_at: u64,
    age: u64, // worth of the last victim
    used: u64,
}

/// How many entries one answer looks at: a call must end soon. Who needs more asks again.
const LOOKS: usize = 256;

impl Policy for Thrift {
    fn new(info: &Info) -> Result<Self, &'static str> {
        Ok(Thrift {
            slots: alloc(info.max_slots as usize)?,
            may_go: Heap::new(info.max_slots as usize)?,
            taken: alloc(LOOKS)?,
            double_at: info.number("double_at", 128)?,
            age: 0,
            used: 0,
        })
    }
}

impl Thrift {
    /// Gives an entry its worth as of now.
    fn renew(&mut self, slot: u32) {
        self.used += 1;
        let s = &mut self.slots[slot as usize];
        let cost = match self.double_at {
            0 => COST,
            n => COST + u64::from(s.depth) * COST / n,
        };
        s.worth = Worth { value: self.age + cost * SCALE / u64::from(s.size.max(1)), used: self.used };
        s.state &= !NAMED;
        self.sort(slot);
    }

    /// Puts an entry on the heap if it may go, and takes it off if not.
    fn sort(&mut self, slot: u32) {
        let s = &self.slots[slot as usize];
        if s.state & (RESIDENT | PINNED | TAKEN) == RESIDENT {
            let inner = if s.children > 0 { INNER } else { 0 };
            self.may_go.push(slot, Worth { value: s.worth.value | inner, used: s.worth.used });
        } else {
            self.may_go.remove(slot);
        }
    }

    /// The slot of the parent, if that is still the entry that it was.
    fn parent(&self, slot: u32) -> Option<u32> {
        let s = &self.slots[slot as usize];
        let p = self.slots.get(s.parent as usize)?;
        if p.state & RESIDENT != 0 && p.life == s.parent_life {
            Some(s.parent)
        } else {
            None
        }
    }

    fn link(&mut self, slot: u32, parent: u32) {
        if self.parent(slot) == Some(parent) || parent == slot {
            return;
        }
        self.unlink(slot);
        let life = match self.slots.get_mut(parent as usize) {
            Some(p) if p.state & RESIDENT != 0 => {
                p.children += 1;
                p.life
            }
            _ => return,
        };
        let s = &mut self.slots[slot as usize];
        s.parent = parent;
        s.parent_life = life;
        self.sort(parent);
    }

    fn unlink(&mut self, slot: u32) {
        if let Some(p) = self.parent(slot) {
            self.slots[p as usize].children -= 1;
            self.sort(p);
        }
        self.slots[slot as usize].parent = NONE;
    }

    fn insert(&mut self, ev: &Event) {
        self.remove(ev.slot);
        let s = &mut self.slots[ev.slot as usize];
        s.size = ev.size;
        s.depth = ev.depth;
        s.tenant = ev.tenant;
        s.state = RESIDENT;
        s.children = 0;
        s.parent = NONE;
        self.link(ev.slot, ev.parent);
        self.renew(ev.slot);
        self.sort(ev.slot);
    }

    fn remove(&mut self, slot: u32) {
        let s = self.slots[slot as usize];
        if s.state & RESIDENT == 0 {
            return;
        }
        if s.state & NAMED != 0 {
            self.age = self.age.max(s.worth.value);
        }
        self.unlink(slot);
        let s = &mut self.slots[slot as usize];
        s.state = 0;
        s.life = s.life.wrapping_add(1);
        self.may_go.remove(slot);
    }

    fn set(&mut self, slot: u32, bit: u8, on: bool) {
        let s = &mut self.slots[slot as usize];
        s.state = if on { s.state | bit } else { s.state & !bit };
        self.sort(slot);
    }
}

impl Evict for Thrift {
    fn events(&mut self, batch: &[Event]) {
        for ev in batch {
            let state = match self.slots.get(ev.slot as usize) {
                Some(s) => s.state,
                None => continue,
            };
            match ev.op {
                op::INSERT | op::RESIDENT => self.insert(ev),
                _ if state & RESIDENT == 0 => {}
                op::TOUCH => self.renew(ev.slot),
                op::REMOVE => self.remove(ev.slot),
                op::LINK => self.link(ev.slot, ev.parent),
                op::PIN => self.set(ev.slot, PINNED, true),
                op::UNPIN => self.set(ev.slot, PINNED, false),
                _ => {}
            }
        }
    }

    fn victims(&mut self, ask: &Ask, out: &mut [u32]) -> usize {
        let (mut n, mut freed, mut looks) = (0, 0, 0);
        // Each leaf is taken off as if it had gone, so that its parent may follow it in the same answer.
        while n < out.len() && freed < ask.bytes && looks < LOOKS {
            let slot = match self.may_go.pop() {
                Some(slot) => slot,
                None => break,
            };
            self.taken[looks] = slot;
            looks += 1;
            let s = &mut self.slots[slot as usize];
            s.state |= TAKEN;
            if ask.tenant != NONE && ask.tenant != s.tenant {
                continue;
            }
            s.state |= NAMED;
            out[n] = slot;
            n += 1;
            freed += u64::from(s.size) * SIZE_UNIT;
            if let Some(p) = self.parent(slot) {
                self.slots[p as usize].children -= 1;
                self.sort(p);
            }
        }
        // And all is put back, the last one first: only a REMOVE removes.
        let mut named = n;
        for i in (0..looks).rev() {
            let slot = self.taken[i];
            if named > 0 && out[named - 1] == slot {
                named -= 1;
                if let Some(p) = self.parent(slot) {
                    self.slots[p as usize].children += 1;
                    self.sort(p);
                }
            }
            self.slots[slot as usize].state &= !TAKEN;
            self.sort(slot);
        }
        n
    }
}

kvhost::export!(Thrift: evict);
kvhost::manifest!("../manifest.json");
