//! A binary heap of slots, least worth first, that knows where each slot is: any of them can be moved or taken out.

use kvhost::{alloc, NONE};

/// What an entry is worth; of two that are worth the same, the one used longer ago is less.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Worth {
    pub value: u64,
    pub used: u64,
}

#[derive(Clone, Copy)]
struct Node {
    worth: Worth,
    slot: u32,
}

// Integers only, of which all zeros are values.
unsafe impl kvhost::Zero for Node {}

pub struct Heap {
    nodes: &'static mut [Node],
    len: usize,
    at: &'static mut [u32], // by slot: where its node is, or NONE
}

impl Heap {
    pub fn new(slots: usize) -> Result<Self, &'static str> {
        let at = alloc(slots)?;
        at.fill(NONE);
        Ok(Heap { nodes: alloc(slots)?, len: 0, at })
    }

    /// Adds a slot, or moves it to where its worth puts it.
    pub fn push(&mut self, slot: u32, worth: Worth) {
        if self.at[slot as usize] == NONE {
            self.len += 1;
            self.up(self.len - 1, Node { worth, slot });
        } else {
            self.update(slot, worth);
        }
    }

    /// Moves a slot, if it is here.
    pub fn update(&mut self, slot: u32, worth: Worth) {
        let i = self.at[slot as usize];
        if i != NONE {
            self.settle(i as usize, Node { worth, slot });
        }
    }

    /// Takes a slot out, if it is here.
    pub fn remove(&mut self, slot: u32) {
        let i = self.at[slot as usize];
        if i == NONE {
            return;
        }
        self.at[slot as usize] = NONE;
        self.len -= 1;
        if (i as usize) < self.len {
            self.settle(i as usize, self.nodes[self.len]);
        }
    }

    /// Takes out the slot of least worth.
    pub fn pop(&mut self) -> Option<u32> {
        if self.len == 0 {
            return None;
        }
        let slot = self.nodes[0].slot;
        self.remove(slot);
        Some(slot)
    }

    fn put(&mut self, i: usize, n: Node) {
        self.at[n.slot as usize] = i as u32;
        self.nodes[i] = n;
    }

    fn settle(&mut self, i: usize, n: Node) {
        if i > 0 && n.worth < self.nodes[(i - 1) / 2].worth {
            self.up(i, n);
        } else {
            self.down(i, n);
        }
    }

    fn up(&mut self, mut i: usize, n: Node) {
        while i > 0 && n.worth < self.nodes[(i - 1) / 2].worth {
            self.put(i, self.nodes[(i - 1) / 2]);
            i = (i - 1) / 2;
        }
        self.put(i, n);
    }

    fn down(&mut self, mut i: usize, n: Node) {
        loop {
            let mut child = 2 * i + 1;
            if child >= self.len {
                break;
            }
            if child + 1 < self.len && self.nodes[child + 1].worth < self.nodes[child].worth {
                child += 1;
            }
            if n.worth <= self.nodes[child].worth {
                break;
            }
            self.put(i, self.nodes[child]);
            i = child;
        }
        self.put(i, n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The heap against a sorted list, over a stream of pushes, moves and removals.
    #[test]
    fn pops_in_order() {
        let (mut h, mut model) = (Heap::new(100).unwrap(), Vec::new());
        let mut x = 1u64;
        for step in 0..20_000u64 {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let slot = (x >> 33) as u32 % 100;
            match (x >> 20) % 4 {
                0 => {
                    h.remove(slot);
                    model.retain(|&(_, s)| s != slot);
                }
                1 => {
                    model.sort();
                    let want = if model.is_empty() { None } else { Some(model.remove(0).1) };
                    assert_eq!(h.pop(), want);
                }
                _ => {
                    let w = Worth { value: (x >> 40) % 50, used: step };
                    h.push(slot, w);
                    model.retain(|&(_, s)| s != slot);
                    model.push((w, slot));
                }
            }
            assert_eq!(h.len, model.len());
        }
    }
}
