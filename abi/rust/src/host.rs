//! What a guest can ask of the host. Outside WebAssembly, for tests of a policy's own, these do nothing.

/// How much a line matters.
#[allow(missing_docs)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    Debug = 0,
    Info = 1,
    Warn = 2,
    Error = 3,
}

#[cfg(target_arch = "wasm32")]
mod imp {
    #[link(wasm_import_module = "kvhost_1")]
    extern "C" {
        pub fn log_enabled(level: i32) -> i32;
        pub fn log(level: i32, at: *const u8, len: usize);
        pub fn fail(at: *const u8, len: usize);
        pub fn now_ns() -> u64;
        pub fn counter_add(id: u32, delta: i64);
        pub fn rand_u64() -> u64;
    }
}

#[cfg(not(target_arch = "wasm32"))]
#[allow(clippy::missing_safety_doc)]
mod imp {
    pub unsafe fn log_enabled(_: i32) -> i32 {
        0
    }
    pub unsafe fn log(_: i32, _: *const u8, _: usize) {}
    pub unsafe fn fail(_: *const u8, _: usize) {}
    pub unsafe fn now_ns() -> u64 {
        0
    }
    pub unsafe fn counter_add(_: u32, _: i64) {}
    pub unsafe fn rand_u64() -> u64 {
        0
    }
}

/// Says whether a line of this level would be kept: ask before formatting.
pub fn log_enabled(level: Level) -> bool {
    unsafe { imp::log_enabled(level as i32) != 0 }
}
/// Logs a line.
pub fn log(level: Level, text: &str) {
    unsafe { imp::log(level as i32, text.as_ptr(), text.len()) }
}
/// Gives the words for the negative status or trap that follows in this call.
pub fn fail(text: &str) {
    unsafe { imp::fail(text.as_ptr(), text.len()) }
}
/// The host's monotonic nanoseconds, the same during one call. Grant `clock`.
pub fn now_ns() -> u64 {
    unsafe { imp::now_ns() }
}
/// Adds to the manifest's counter number `id`. Grant `metrics`.
pub fn counter_add(id: u32, delta: i64) {
    unsafe { imp::counter_add(id, delta) }
}
/// The next number of a sequence that follows from Info.seed. Grant `random`.
pub fn rand_u64() -> u64 {
    unsafe { imp::rand_u64() }
}
