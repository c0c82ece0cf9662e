//! The kit for kvhost policies in Rust. `abi/SPEC.md` is the contract; this crate is its records, its imports and its
//! exports. It needs no standard library, no allocator and no other crate.
//!
//! A policy is a type with [`Policy`] and the traits of its roles, named once in [`export!`]:
//!
//! ```ignore
//! #![no_std]
//! use kvhost::{Ask, Evict, Event, Info, Policy};
//!
//! struct Mine { sizes: &'static mut [u32] }
//!
//! impl Policy for Mine {
//!     fn new(info: &Info) -> Result<Self, &'static str> {
//!         Ok(Mine { sizes: kvhost::alloc(info.max_slots as usize)? })
//!     }
//! }
//!
//! impl Evict for Mine {
//!     fn events(&mut self, batch: &[Event]) { .. }
//!     fn victims(&mut self, ask: &Ask, out: &mut [u32]) -> usize { .. }
//! }
//!
//! kvhost::export!(Mine: evict);
//! kvhost::manifest!("manifest.json");
//! ```
#![no_std]
#![warn(missing_docs)]

pub mod glue;
mod host;
mod memory;
mod records;

pub use host::{counter_add, fail, log, log_enabled, now_ns, rand_u64, Level};
pub use memory::{alloc, Zero};
pub use records::*;

/// The version of the contract.
pub const ABI: u32 = 1;
/// No parent resident, the host's choice of root, or any tenant.
pub const NONE: u32 = 0xffff_ffff;
/// The unit of every u32 size.
pub const SIZE_UNIT: u64 = 4096;

/// Kinds of buffers.
#[allow(missing_docs)]
pub mod buffer {
    pub const INFO: u32 = 0;
    pub const EVENTS: u32 = 1;
    pub const ARGS: u32 = 2;
    pub const RESULT: u32 = 3;
    pub const ROOTS: u32 = 4;
    pub const STATE: u32 = 5;
    pub const KINDS: u32 = 6;
}

/// What an event says.
#[allow(missing_docs)]
pub mod op {
    pub const INSERT: u8 = 1;
    pub const TOUCH: u8 = 2;
    pub const REMOVE: u8 = 3;
    pub const LINK: u8 = 4;
    pub const PIN: u8 = 5;
    pub const UNPIN: u8 = 6;
    pub const RESIDENT: u8 = 7;
    pub const REQUEST_END: u8 = 8;
}

/// The bit of [`Info::features`] that says that REQUEST_END events carry hints.
pub const FEATURE_HINTS: u64 = 1;

/// The bit of [`Info::features`] that says that candidates tell kind, from, to and hits.
pub const FEATURE_LEVELS: u64 = 2;

/// What would become of a [`Candidate`] that is admitted.
#[allow(missing_docs)]
pub mod kind {
    pub const NEW: u8 = 0;
    pub const DEMOTION: u8 = 1;
    pub const PROMOTION: u8 = 2;
}

/// [`RequestEnd::reason`]: why a request ended; 0 is unknown.
#[allow(missing_docs)]
pub mod end {
    pub const STOP: u8 = 1;
    pub const LENGTH: u8 = 2;
    pub const TOOL_CALL: u8 = 3;
    pub const ABORT: u8 = 4;
}

impl Event {
    /// The record of a REQUEST_END, and nothing for other events.
    pub fn request_end(&self) -> Option<&RequestEnd> {
        if self.op != op::REQUEST_END {
            return None;
        }
        // Both records are 56 bytes of integers, aligned alike.
        Some(unsafe { &*(self as *const Event as *const RequestEnd) })
    }
}

/// The outcome of a call: 0 is success, above 0 leaves the call to the host, below 0 is a fault.
pub type Status = i32;
/// The host's default applies.
pub const DEFAULT: Status = 1;
/// An argument that the guest cannot read.
pub const BAD_INPUT: Status = -1;
/// The guest cannot hold what it was given.
pub const NO_SPACE: Status = -2;
/// The guest found itself inconsistent.
pub const INTERNAL: Status = -3;

/// What every policy has.
pub trait Policy: Sized {
    /// Makes an empty policy. Allocate here, bounded by `info`, and not later. The words of an error go to the operator.
    fn new(info: &Info) -> Result<Self, &'static str>;
    /// A namespace's text, once, before any record that names its id.
    fn namespace(&mut self, _id: u32, _text: &[u8]) -> Result<(), &'static str> {
        Ok(())
    }
}

/// Decides which entries of one root go.
pub trait Evict: Policy {
    /// Applies a batch.
    fn events(&mut self, batch: &[Event]);
    /// Writes victims' slots, best first, and answers how many. `out` has room for `ask.max_victims`. Naming a victim is
    /// not removal: it stays until its REMOVE.
    fn victims(&mut self, ask: &Ask, out: &mut [u32]) -> usize;
}

/// Decides which entries are stored at all, and which move to another level: see [`kind`].
pub trait Admit: Policy {
    /// Writes 1 or 0 for each candidate; `out` is as long as `batch`.
    fn admit(&mut self, batch: &[Candidate], out: &mut [u8]);
}

/// Names new pieces. Each is asked for once, and the name is written down.
pub trait Place: Policy {
    /// Writes the path and answers the root: an index into `roots`, or [`NONE`].
    fn place(&mut self, query: &PlaceQuery, roots: &[RootFacts], path: &mut Path) -> Result<u32, &'static str>;
}

/// Orders the page bytes of a chunk's payload.
pub trait Layout: Policy {
    /// Writes segments and answers how many there are; more than `out` has room for is a fault.
    fn layout(&mut self, header: &LayoutHeader, planes: &[Plane], out: &mut [Segment]) -> usize;
}

/// Keeps state for the next instance. The manifest's state_format names its form.
pub trait State: Policy {
    /// Writes the state and answers its length; more than `out` has room for is a fault.
    fn save(&mut self, out: &mut [u8]) -> usize;
    /// Takes a state over; false leaves the policy as new.
    fn load(&mut self, state: &[u8]) -> bool;
}

/// A path under construction.
pub struct Path<'a> {
    at: &'a mut [u8],
    len: usize,
}

impl<'a> Path<'a> {
    /// Starts an empty path.
    pub fn new(at: &'a mut [u8]) -> Self {
        Path { at, len: 0 }
    }
    /// The bytes so far, or None when they did not fit.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.at.get(..self.len)
    }
    /// Appends a byte.
    pub fn put(&mut self, c: u8) {
        if let Some(b) = self.at.get_mut(self.len) {
            *b = c;
        }
        self.len += 1;
    }
    /// Appends text.
    pub fn text(&mut self, s: &str) {
        for &c in s.as_bytes() {
            self.put(c);
        }
    }
    /// Appends a number in decimal.
    pub fn number(&mut self, v: u32) {
        if v >= 10 {
            self.number(v / 10);
        }
        self.put(b'0' + (v % 10) as u8);
    }
    /// Appends bytes in hexadecimal.
    pub fn hex(&mut self, bytes: &[u8]) {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        for &b in bytes {
            self.put(DIGITS[(b >> 4) as usize]);
            self.put(DIGITS[(b & 15) as usize]);
        }
    }
}
