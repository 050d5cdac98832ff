//! Memory as a C caller has it. Every piece is an allocation of its own, exactly as large as the
//! library is told, so that AddressSanitizer sees one byte too many. A piece is filled with a
//! pattern, which shows what was written.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::c_char;
use std::marker::PhantomData;

/// The value of each byte that nobody has written.
const PATTERN: u8 = 0xa5;

/// Room for some values of a C type, or NULL.
pub struct Room<T> {
    at: *mut u8,
    bytes: usize,
    values: PhantomData<T>,
}

impl<T: Copy> Room<T> {
    /// Returns room for exactly `count` values.
    pub fn new(count: usize) -> Room<T> {
        Room::of_bytes(count * size_of::<T>())
    }

    /// Returns that many bytes, which need not be a whole number of values.
    pub fn of_bytes(bytes: usize) -> Room<T> {
        let layout = Layout::from_size_align(bytes, 8).expect("a small piece");
        // SAFETY: the size is not zero where memory is asked for.
        let at = if bytes == 0 { std::ptr::dangling_mut::<u64>().cast() } else { unsafe { alloc(layout) } };
        assert!(!at.is_null(), "{bytes} bytes");
        // SAFETY: allocated just now.
        unsafe { at.write_bytes(PATTERN, bytes) };
        Room { at, bytes, values: PhantomData }
    }

    /// Returns NULL.
    pub fn null() -> Room<T> {
        Room { at: std::ptr::null_mut(), bytes: 0, values: PhantomData }
    }

    /// Returns room that holds these values.
    pub fn with(values: &[T]) -> Room<T> {
        let room = Room::new(values.len());
        // SAFETY: as many bytes as the values have, and elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast(), room.at, room.bytes) };
        room
    }

    /// Returns how many values there is room for.
    pub fn count(&self) -> usize {
        self.bytes / size_of::<T>()
    }

    pub fn is_null(&self) -> bool {
        self.at.is_null()
    }

    pub fn as_ptr(&self) -> *mut T {
        self.at.cast()
    }

    /// Whether nothing was written from value `count` on.
    pub fn untouched_from(&self, count: usize) -> bool {
        (count * size_of::<T>()..self.bytes).all(|at| {
            // SAFETY: within the piece, initialised when it was made.
            unsafe { self.at.add(at).read() == PATTERN }
        })
    }

    pub fn untouched(&self) -> bool {
        self.untouched_from(0)
    }

    /// Returns the value at `index`. Any bytes are a value of the types that are asked for.
    pub fn get(&self, index: usize) -> T {
        assert!((index + 1) * size_of::<T>() <= self.bytes, "value {index} of {} bytes", self.bytes);
        // SAFETY: within the piece, and initialised.
        unsafe { self.as_ptr().add(index).read_unaligned() }
    }

    /// Puts a value over the bytes from `offset` on, as far as the piece goes.
    pub fn put<V: Copy>(&self, offset: usize, value: V) {
        let count = size_of::<V>().min(self.bytes.saturating_sub(offset));
        // SAFETY: within both, which are different places.
        unsafe { std::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), self.at.add(offset), count) };
    }
}

impl<T> Drop for Room<T> {
    fn drop(&mut self) {
        if !self.at.is_null() && self.bytes > 0 {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.at, Layout::from_size_align(self.bytes, 8).expect("as it was made")) };
        }
    }
}

/// A string as C passes it, with nothing behind its NUL. It may be NULL.
pub struct Text {
    bytes: Option<Box<[u8]>>,
}

impl Text {
    /// Returns a string of bytes without a NUL.
    pub fn new(bytes: &[u8]) -> Text {
        let upto = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        Text { bytes: Some(bytes[..upto].iter().copied().chain([0]).collect()) }
    }

    pub fn null() -> Text {
        Text { bytes: None }
    }

    pub fn is_null(&self) -> bool {
        self.bytes.is_none()
    }

    pub fn as_ptr(&self) -> *const c_char {
        self.bytes.as_ref().map_or(std::ptr::null(), |bytes| bytes.as_ptr().cast())
    }

    /// Returns the bytes without the NUL.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_deref().map_or(&[], |bytes| &bytes[..bytes.len() - 1])
    }

    pub fn is_utf8(&self) -> bool {
        std::str::from_utf8(self.bytes()).is_ok()
    }

    /// Whether a dimension may have this name. NULL names the only dimension.
    pub fn may_name_a_dimension(&self) -> bool {
        self.bytes.is_none() || self.is_utf8() && !self.bytes().is_empty()
    }
}

/// Strings with the array of pointers to them.
pub struct Texts {
    pub texts: Vec<Text>,
    pub pointers: Room<*const c_char>,
}

impl Texts {
    pub fn new(texts: Vec<Text>) -> Texts {
        let pointers = Room::with(&texts.iter().map(Text::as_ptr).collect::<Vec<_>>());
        Texts { texts, pointers }
    }

    /// Returns NULL in place of an array.
    pub fn null() -> Texts {
        Texts { texts: Vec::new(), pointers: Room::null() }
    }

    /// Whether each of them is a string that can be a name. Where one is not, the call is wrong
    /// with any mesh.
    pub fn are_names(&self) -> bool {
        let all = |index: usize| self.texts[..index].iter().any(|text| text.bytes() == self.texts[index].bytes());
        self.texts.iter().all(|text| !text.is_null() && text.is_utf8() && !text.bytes().is_empty())
            && !(0..self.texts.len()).any(all)
    }
}
