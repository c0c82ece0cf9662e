//! Memory that is never given back: pages from memory.grow, one after the other.

/// Types of which all zeros are a value.
///
/// # Safety
/// They must be: memory is handed out as it comes.
pub unsafe trait Zero: Copy {}
unsafe impl Zero for u8 {}
unsafe impl Zero for u16 {}
unsafe impl Zero for u32 {}
unsafe impl Zero for u64 {}
unsafe impl Zero for i32 {}
unsafe impl Zero for i64 {}

/// Gives zeroed memory for the life of the instance, 16-aligned. Allocate in `new`, bounded by what Info says. The error is
/// for a module with too few memory_pages.
pub fn alloc<T: Zero>(n: usize) -> Result<&'static mut [T], &'static str> {
    const FULL: &str = "memory_pages is too small for so much";
    let bytes = n.checked_mul(core::mem::size_of::<T>()).ok_or(FULL)?;
    let at = imp::grow(bytes).ok_or(FULL)? as *mut T;
    // Fresh, zeroed, aligned for every integer, and handed out once.
    Ok(unsafe { core::slice::from_raw_parts_mut(at, n) })
}

#[cfg(target_arch = "wasm32")]
mod imp {
    use core::arch::wasm32::{memory_grow, memory_size};

    static mut NEXT: usize = 0;
    static mut END: usize = 0;

    pub fn grow(bytes: usize) -> Option<*mut u8> {
        // A guest has one thread.
        unsafe {
            let bytes = bytes.checked_add(15)? & !15;
            if bytes > END - NEXT {
                let pages = bytes / 65536 + 1;
                let here = memory_size(0) << 16;
                if memory_grow(0, pages) == usize::MAX {
                    return None;
                }
                if here != END {
                    NEXT = here; // the memory grew in between
                }
                END = here + (pages << 16);
            }
            let at = NEXT;
            NEXT += bytes;
            Some(at as *mut u8)
        }
    }
}

#[cfg(not(target_arch = "wasm32"))]
mod imp {
    extern crate std;
    use std::alloc::{alloc_zeroed, Layout};

    pub fn grow(bytes: usize) -> Option<*mut u8> {
        let at = unsafe { alloc_zeroed(Layout::from_size_align(bytes.max(16), 16).ok()?) };
        if at.is_null() {
            None
        } else {
            Some(at)
        }
    }
}
