//! The records of the contract: little-endian, natural alignment, as section 13 has them.
#![allow(missing_docs)]

macro_rules! record {
    ($(#[$doc:meta])* $name:ident, $size:expr, { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
        pub struct $name { $(pub $field: $type),* }
        const _: [(); $size] = [(); core::mem::size_of::<$name>()];
        // All fields are integers, of which all zeros and all ones are values.
        unsafe impl crate::Zero for $name {}
    };
}

record!(/// What the host tells an eviction policy.
Event, 56, {
    slot: u32, parent: u32, key: u64, parent_key: u64, size: u32, depth: u32, request: u32, tenant: u32,
    op: u8, reserved: [u8; 7], time: u64,
});
record!(/// An event with the op REQUEST_END: see [`Event::request_end`].
RequestEnd, 56, {
    slot: u32, reserved: u32, return_ms: u64, priority: i32, reserved2: u32, tokens_in: u32, tokens_out: u32, request: u32, tenant: u32,
    op: u8, reason: u8, reserved3: [u8; 6], time: u64,
});
record!(/// What an instance is told at its start. The settings follow: see [`Info::setting`].
Info, 80, {
    size: u32, abi: u32, features: u64,
    event_stride: u32, ask_stride: u32, admit_stride: u32, place_stride: u32, reserved: u32, plane_stride: u32, root_stride: u32,
    max_slots: u32, max_batch: u32, max_victims: u32, max_namespaces: u32, config_len: u32,
    capacity: u64, seed: u64,
});
record!(/// The question for victims.
Ask, 16, { bytes: u64, max_victims: u32, tenant: u32 });
record!(/// What may be stored, or moved to another level.
Candidate, 64, {
    key: u64, parent_key: u64, namespace: u32, group: u32, size: u32, depth: u32, request: u32, tenant: u32,
    flags: u32, copies: u32, time: u64, kind: u8, from: u8, to: u8, reserved: u8, hits: u32,
});
record!(/// What wants a path.
PlaceQuery, 56, {
    namespace: u32, group: u32, rank: u32, key_len: u32, size: u32, reserved: u32, key: [u8; 32],
});
record!(/// Where a path is in RESULT.
PlaceAnswer, 16, { root: u32, off: u32, len: u32, reserved: u32 });
record!(/// Before the root facts.
RootsHeader, 8, { count: u32, stride: u32 });
record!(/// A root as it is now.
RootFacts, 40, { id: u32, flags: u32, capacity: u64, free: u64, read_bps: u64, write_bps: u64 });
record!(/// The shape of a chunk.
LayoutHeader, 16, { namespace: u32, group: u32, blocks: u32, planes: u32 });
record!(/// One stream of pages.
Plane, 16, { layer: u32, part: u32, page_bytes: u32, reserved: u32 });
record!(/// A run of page bytes in a payload.
Segment, 24, { plane: u32, block: u32, blocks: u32, page_off: u32, page_len: u32, gap: u32 });

/// [`RootFacts::flags`]: it takes stores at present.
pub const ROOT_WRITABLE: u32 = 1;
/// [`Candidate::flags`]: the parent is resident, in any level.
pub const PARENT_RESIDENT: u32 = 1;
/// [`Candidate::flags`]: a child is resident, in any level, or stored with it.
pub const CONTINUED: u32 = 2;
/// [`Candidate::flags`]: this host has no level of its own behind `to`.
pub const LAST: u32 = 4;
/// [`Candidate::flags`] at a promotion: level `to` has room, so that nothing goes for it.
pub const ROOM: u32 = 8;
/// [`Candidate::from`] of what an engine stores.
pub const NO_LEVEL: u8 = 0xff;
/// [`Candidate::from`] and [`Candidate::to`]: another host.
pub const PEER_LEVEL: u8 = 0xfe;

impl Info {
    /// The value of a setting as the operator wrote it. Call it on the reference that `new` was given, not on a copy: the
    /// settings stand behind it in memory.
    pub fn setting(&self, key: &str) -> Option<&str> {
        // The glue has checked that size and config_len stay within the buffer that this reference points into.
        let text = unsafe {
            core::slice::from_raw_parts((self as *const Info as *const u8).add(self.size as usize), self.config_len as usize)
        };
        let text = core::str::from_utf8(text).ok()?;
        text.lines().find_map(|line| {
            let mut parts = line.splitn(2, '=');
            if parts.next()? == key {
                parts.next()
            } else {
                None
            }
        })
    }
    /// The value of a setting, or `default` when the operator gave none.
    pub fn number(&self, key: &str, default: u64) -> Result<u64, &'static str> {
        match self.setting(key) {
            None => Ok(default),
            Some(v) => v.parse().map_err(|_| "a setting is not a whole number"),
        }
    }
}
