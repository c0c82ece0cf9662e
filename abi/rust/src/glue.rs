//! What stands between the exports, which [`export!`](crate::export) writes, and a policy's methods: buffers, records and
//! results. Policies have no use for it.
#![allow(missing_docs)]
#![allow(clippy::missing_safety_doc)]

use crate::*;

/// Buffers of one module: one per kind, allocated when the host asks, and kept.
pub struct Buffers([(usize, u32); buffer::KINDS as usize]);

impl Buffers {
    #[allow(clippy::new_without_default)]
    pub const fn new() -> Self {
        Buffers([(0, 0); buffer::KINDS as usize])
    }
    pub fn give(&mut self, kind: u32, len: u32) -> usize {
        match self.0.get_mut(kind as usize) {
            None => 0,
            Some(b) => {
                if b.0 == 0 || b.1 < len {
                    match alloc::<u8>(len as usize) {
                        Err(_) => return 0,
                        Ok(fresh) => *b = (fresh.as_mut_ptr() as usize, len),
                    }
                }
                b.0
            }
        }
    }
    /// The bytes of a buffer. Kinds do not overlap, and the host writes between calls only.
    pub unsafe fn bytes(&self, kind: u32) -> &'static mut [u8] {
        let (at, len) = self.0[kind as usize];
        if at == 0 {
            return &mut [];
        }
        core::slice::from_raw_parts_mut(at as *mut u8, len as usize)
    }
}

pub const fn pack(status: Status, count: usize) -> u64 {
    ((status as u32 as u64) << 32) | count as u32 as u64
}

/// The n records at the start of a buffer. Those that stand further apart than this version has them are moved together.
pub fn records<T: Zero>(b: &mut [u8], n: u32, stride: u32) -> Option<&mut [T]> {
    let size = core::mem::size_of::<T>();
    let (n, stride) = (n as usize, stride as usize);
    if stride < size || n as u64 * stride as u64 > b.len() as u64 {
        return None;
    }
    if stride > size {
        for i in 1..n {
            b.copy_within(i * stride..i * stride + size, i * size);
        }
    }
    // Buffers are 16-aligned, headers before records are multiples of 8, and every byte is a value of an integer.
    Some(unsafe { core::slice::from_raw_parts_mut(b.as_mut_ptr() as *mut T, n) })
}

fn array<T: Zero>(b: &mut [u8]) -> &mut [T] {
    let n = b.len() / core::mem::size_of::<T>();
    unsafe { core::slice::from_raw_parts_mut(b.as_mut_ptr() as *mut T, n) }
}

fn failed(words: &'static str) -> Status {
    fail(words);
    BAD_INPUT
}

pub fn init<P: Policy>(policy: &mut Option<P>, info: &mut [u8], len: u32) -> Status {
    let b = match info.get_mut(..len as usize) {
        Some(b) if b.len() >= core::mem::size_of::<Info>() => b,
        _ => return BAD_INPUT,
    };
    let i = &array::<Info>(b)[0];
    let known = i.abi == ABI && i.size as usize >= core::mem::size_of::<Info>();
    if !known || i.size as u64 + i.config_len as u64 > len as u64 || policy.is_some() {
        return BAD_INPUT;
    }
    match P::new(i) {
        Err(words) => failed(words),
        Ok(p) => {
            *policy = Some(p);
            0
        }
    }
}

pub fn namespace<P: Policy>(policy: &mut Option<P>, text: &[u8], id: u32, len: u32) -> Status {
    match (policy, text.get(..len as usize)) {
        (Some(p), Some(text)) => p.namespace(id, text).map_or_else(failed, |_| 0),
        _ => BAD_INPUT,
    }
}

pub fn events<P: Evict>(policy: &mut Option<P>, b: &mut [u8], n: u32, stride: u32) -> Status {
    match (policy, records::<Event>(b, n, stride)) {
        (Some(p), Some(batch)) => {
            p.events(batch);
            0
        }
        _ => BAD_INPUT,
    }
}

pub fn step<P: Evict>(policy: &mut Option<P>, b: &mut [u8], args: &mut [u8], result: &mut [u8], n: u32, stride: u32) -> u64 {
    if n > 0 {
        let status = events(policy, b, n, stride);
        if status != 0 {
            return pack(status, 0);
        }
    }
    match (policy, array::<Ask>(args).first()) {
        (Some(p), Some(ask)) => {
            let out = array::<u32>(result);
            let most = out.len().min(ask.max_victims as usize);
            pack(0, p.victims(ask, &mut out[..most]))
        }
        _ => pack(BAD_INPUT, 0),
    }
}

pub fn admit<P: Admit>(policy: &mut Option<P>, args: &mut [u8], result: &mut [u8], n: u32, stride: u32) -> u64 {
    match (policy, records::<Candidate>(args, n, stride), result.get_mut(..n as usize)) {
        (_, _, None) => pack(NO_SPACE, 0),
        (Some(p), Some(batch), Some(out)) => {
            p.admit(batch, out);
            pack(0, n as usize)
        }
        _ => pack(BAD_INPUT, 0),
    }
}

pub fn place<P: Place>(policy: &mut Option<P>, args: &mut [u8], roots: &mut [u8], result: &mut [u8], n: u32, stride: u32) -> u64 {
    let mut facts: &[RootFacts] = &[];
    if roots.len() >= 8 {
        let (head, rest) = roots.split_at_mut(8);
        let h = &mut array::<RootsHeader>(head)[0];
        if let Some(all) = records::<RootFacts>(rest, h.count, h.stride) {
            h.stride = core::mem::size_of::<RootFacts>() as u32; // they stand together now
            facts = all;
        }
    }
    let (p, batch) = match (policy, records::<PlaceQuery>(args, n, stride)) {
        (Some(p), Some(batch)) => (p, batch),
        _ => return pack(BAD_INPUT, 0),
    };
    let mut off = batch.len() * core::mem::size_of::<PlaceAnswer>();
    if off > result.len() {
        return pack(NO_SPACE, 0);
    }
    for (i, q) in batch.iter().enumerate() {
        let mut path = Path::new(&mut result[off..]);
        let root = match p.place(q, facts, &mut path) {
            Ok(root) => root,
            Err(words) => return pack(failed(words), 0),
        };
        let len = match path.bytes() {
            Some(b) => b.len(),
            None => return pack(NO_SPACE, 0),
        };
        array::<PlaceAnswer>(result)[i] = PlaceAnswer { root, off: off as u32, len: len as u32, reserved: 0 };
        off += len;
    }
    pack(0, n as usize)
}

pub fn layout<P: Layout>(policy: &mut Option<P>, args: &mut [u8], result: &mut [u8], n: u32, stride: u32) -> u64 {
    const HEADER: usize = core::mem::size_of::<LayoutHeader>();
    if args.len() < HEADER {
        return pack(BAD_INPUT, 0);
    }
    let (head, rest) = args.split_at_mut(HEADER);
    let h = array::<LayoutHeader>(head)[0];
    match (policy, records::<Plane>(rest, n, stride)) {
        (Some(p), Some(planes)) if h.planes == n => {
            let out = array::<Segment>(result);
            match p.layout(&h, planes, out) {
                count if count > out.len() => pack(NO_SPACE, 0),
                count => pack(0, count),
            }
        }
        _ => pack(BAD_INPUT, 0),
    }
}

pub fn save<P: State>(policy: &mut Option<P>, state: &mut [u8], limit: u32) -> u64 {
    match (policy, state.get_mut(..limit as usize)) {
        (Some(p), Some(out)) => match p.save(out) {
            n if n > limit as usize => pack(NO_SPACE, 0),
            n => pack(0, n),
        },
        _ => pack(BAD_INPUT, 0),
    }
}

pub fn load<P: State>(policy: &mut Option<P>, state: &[u8], len: u32) -> Status {
    match (policy, state.get(..len as usize)) {
        (Some(p), Some(b)) => {
            if p.load(b) {
                0
            } else {
                DEFAULT
            }
        }
        _ => BAD_INPUT,
    }
}

/// Writes the exports of a module: a policy's type, and its roles, each the name of a trait in small letters. Add `state`
/// for one that keeps state.
#[macro_export]
macro_rules! export {
    ($policy:ty: $($role:ident),+ $(,)?) => {
        static mut KVHOST_POLICY: Option<$policy> = None;
        static mut KVHOST_BUFFERS: $crate::glue::Buffers = $crate::glue::Buffers::new();

        // A guest has one thread, and calls never overlap.
        #[allow(dead_code)]
        unsafe fn kvhost_policy() -> &'static mut Option<$policy> {
            &mut *core::ptr::addr_of_mut!(KVHOST_POLICY)
        }
        #[allow(dead_code)]
        unsafe fn kvhost_bytes(kind: u32) -> &'static mut [u8] {
            (*core::ptr::addr_of!(KVHOST_BUFFERS)).bytes(kind)
        }

        #[no_mangle]
        pub extern "C" fn kvhost_abi_1() {}
        #[no_mangle]
        pub unsafe extern "C" fn kv_buffer(kind: u32, len: u32) -> usize {
            (*core::ptr::addr_of_mut!(KVHOST_BUFFERS)).give(kind, len)
        }
        #[no_mangle]
        pub unsafe extern "C" fn kv_init(len: u32) -> i32 {
            $crate::glue::init(kvhost_policy(), kvhost_bytes($crate::buffer::INFO), len)
        }
        #[no_mangle]
        pub unsafe extern "C" fn kv_namespace(id: u32, len: u32) -> i32 {
            $crate::glue::namespace(kvhost_policy(), kvhost_bytes($crate::buffer::INFO), id, len)
        }
        $($crate::export_role!($role);)+

        #[cfg(target_arch = "wasm32")]
        #[panic_handler]
        fn kvhost_panic(_: &core::panic::PanicInfo) -> ! {
            $crate::fail("panic: see the guest stack");
            core::arch::wasm32::unreachable()
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! export_role {
    (evict) => {
        #[no_mangle]
        pub unsafe extern "C" fn kv_events(n: u32, stride: u32) -> i32 {
            $crate::glue::events(kvhost_policy(), kvhost_bytes($crate::buffer::EVENTS), n, stride)
        }
        #[no_mangle]
        pub unsafe extern "C" fn kv_step(n: u32, stride: u32) -> u64 {
            $crate::glue::step(
                kvhost_policy(),
                kvhost_bytes($crate::buffer::EVENTS),
                kvhost_bytes($crate::buffer::ARGS),
                kvhost_bytes($crate::buffer::RESULT),
                n,
                stride,
            )
        }
    };
    (admit) => {
        #[no_mangle]
        pub unsafe extern "C" fn kv_admit(n: u32, stride: u32) -> u64 {
            $crate::glue::admit(kvhost_policy(), kvhost_bytes($crate::buffer::ARGS), kvhost_bytes($crate::buffer::RESULT), n, stride)
        }
    };
    (place) => {
        #[no_mangle]
        pub unsafe extern "C" fn kv_place(n: u32, stride: u32) -> u64 {
            $crate::glue::place(
                kvhost_policy(),
                kvhost_bytes($crate::buffer::ARGS),
                kvhost_bytes($crate::buffer::ROOTS),
                kvhost_bytes($crate::buffer::RESULT),
                n,
                stride,
            )
        }
    };
    (layout) => {
        #[no_mangle]
        pub unsafe extern "C" fn kv_layout(n: u32, stride: u32) -> u64 {
            $crate::glue::layout(kvhost_policy(), kvhost_bytes($crate::buffer::ARGS), kvhost_bytes($crate::buffer::RESULT), n, stride)
        }
    };
    (state) => {
        #[no_mangle]
        pub unsafe extern "C" fn kv_save(limit: u32) -> u64 {
            $crate::glue::save(kvhost_policy(), kvhost_bytes($crate::buffer::STATE), limit)
        }
        #[no_mangle]
        pub unsafe extern "C" fn kv_load(len: u32) -> i32 {
            $crate::glue::load(kvhost_policy(), kvhost_bytes($crate::buffer::STATE), len)
        }
    };
}

/// Puts a file into the module as its manifest. The path is relative to the source file.
#[macro_export]
macro_rules! manifest {
    ($path:literal) => {
        #[cfg_attr(target_arch = "wasm32", link_section = "kvhost.manifest")]
        #[used]
        pub static KVHOST_MANIFEST: [u8; include_bytes!($path).len()] = *include_bytes!($path);
    };
}
