//! Reads the arguments of C callers, and writes their answers.

use std::ffi::{CStr, c_char};
use std::fmt::Display;
use std::time::Duration;

use super::pointers::{null, out};
use crate::error::{Error, Result, Status};

/// No options struct will have more bytes than this. A larger struct_size is garbage.
const MAX_STRUCT_SIZE: usize = 4096;

/// The most names or dimensions that one call may list. A larger count is garbage.
const MAX_LIST: usize = 1 << 16;

/// A required string, as UTF-8.
///
/// # Safety
/// `string` is NULL or NUL-terminated and lives as long as the result is used.
pub(super) unsafe fn text<'a>(what: impl Display + Copy, string: *const c_char) -> Result<&'a str> {
    // SAFETY: the caller's contract.
    unsafe { optional_text(what, string)? }.ok_or_else(|| null(what))
}

/// A string that may be NULL.
///
/// # Safety
/// The conditions of [`text`] hold.
pub(super) unsafe fn optional_text<'a>(what: impl Display, string: *const c_char) -> Result<Option<&'a str>> {
    if string.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, NUL-terminated by the caller's contract.
    let string = unsafe { CStr::from_ptr(string) };
    match string.to_str() {
        Ok(text) => Ok(Some(text)),
        Err(_) => Err(Error::invalid(format!("{what} is not UTF-8: {:?}", string.to_string_lossy()))),
    }
}

/// Reads a list of `count` values. It is empty, whatever `values` is, when `count` is 0.
///
/// # Safety
/// `values` is NULL or points to `count` readable values that live as long as the result is used.
pub(super) unsafe fn list<'a, T>(what: &str, values: *const T, count: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if values.is_null() {
        return Err(Error::invalid(format!("{what} is NULL, but its count is {count}")));
    }
    if count > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(Error::invalid(format!("the count of {what} is {count}, more than memory can hold")));
    }
    // SAFETY: not NULL, and the caller vouches for `count` values.
    Ok(unsafe { std::slice::from_raw_parts(values, count) })
}

/// Does what [`list`] does, for a list that describes dimensions. A huge count is a mistake there.
///
/// # Safety
/// The conditions of [`list`] hold.
pub(super) unsafe fn short_list<'a, T>(what: &str, values: *const T, count: usize) -> Result<&'a [T]> {
    if count > MAX_LIST {
        return Err(Error::invalid(format!("the count of {what} is {count}, more than {MAX_LIST}")));
    }
    // SAFETY: the caller's contract.
    unsafe { list(what, values, count) }
}

/// Reads the sizes of `count` dimensions, in ranks. No size is negative.
///
/// # Safety
/// The conditions of [`list`] hold.
pub(super) unsafe fn sizes(what: &str, values: *const i32, count: usize) -> Result<Vec<usize>> {
    // SAFETY: the caller's contract.
    let values = unsafe { short_list(what, values, count)? };
    values.iter().enumerate().map(|(index, value)| natural(format_args!("{what}[{index}]"), *value)).collect()
}

/// Reads a number of ranks, or the index of a rank. Fails when it is negative.
pub(super) fn natural(what: impl Display, value: i32) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::invalid(format!("{what} is {value}, which is negative")))
}

/// Refuses a reserved field that the caller has set.
pub(super) fn check_reserved(what: &str, reserved: &[u32]) -> Result<()> {
    match reserved.iter().find(|value| **value != 0) {
        None => Ok(()),
        Some(value) => Err(Error::invalid(format!(
            "{what}.reserved is {value:#x}, but it must be 0: initialise the struct with its INIT macro, or with zeros"
        ))),
    }
}

/// `count` strings, none of them NULL.
///
/// # Safety
/// The conditions of [`list`] hold for the list, and those of [`text`] for each element.
pub(super) unsafe fn names<'a>(what: &str, names: *const *const c_char, count: usize) -> Result<Vec<&'a str>> {
    // SAFETY: the caller's contract.
    let names = unsafe { short_list(what, names, count)? };
    // SAFETY: the caller's contract.
    names.iter().enumerate().map(|(index, name)| unsafe { text(format_args!("{what}[{index}]"), *name) }).collect()
}

/// A struct of the C contract that begins with its size and grows only at its end.
///
/// # Safety
/// The type is `repr(C)` with a `usize` for its size first, and all-zero bytes are a value of it.
pub(super) unsafe trait Growing: Copy {
    /// The struct's size in the first release of this SONAME (0.2), which the oldest callers have.
    /// It stays when the struct grows.
    const FIRST_SIZE: usize;
}

macro_rules! growing {
    ($($file:ident::$name:ident = $size:literal),+) => {$(
        const _: () = assert!(size_of::<super::$file::$name>() >= $size);
        // SAFETY: repr(C), a size first, and integers, pointers and optional functions otherwise.
        unsafe impl Growing for super::$file::$name {
            const FIRST_SIZE: usize = $size;
        }
    )+};
}

growing!(
    structs::dm_error_info = 88,
    structs::dm_world_options = 72,
    structs::dm_world_info = 72,
    structs::dm_store_callbacks = 64,
    structs::dm_call_options = 40,
    structs::dm_dim_options = 32,
    structs::dm_init_options = 64,
    structs::dm_plan_options = 48,
    recovery::dm_recover_options = 72,
    recovery::dm_recovery = 88,
    events::dm_event = 112,
    events::dm_event_options = 24
);

/// Reads a struct whose first field is its size. Bytes that only this library knows become zero.
///
/// # Safety
/// `given` points to at least as many readable bytes as its first field says.
pub(super) unsafe fn read_struct<T: Growing>(what: &str, given: *const T) -> Result<T> {
    // SAFETY: the caller's contract: the first field is there.
    let size = unsafe { given.cast::<usize>().read_unaligned() };
    check_size(what, size, T::FIRST_SIZE)?;
    let known = size_of::<T>();
    // SAFETY: `size` bytes are readable by the caller's word.
    let bytes = unsafe { std::slice::from_raw_parts(given.cast::<u8>(), size) };
    if let Some(at) = bytes.iter().skip(known).position(|byte| *byte != 0) {
        return Err(Error::invalid(format!(
            "{what}.struct_size is {size} and byte {} of it is set, but this library (version {}) knows only {known} bytes: it is older than the header you compiled with",
            known + at,
            env!("CARGO_PKG_VERSION")
        )));
    }
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: both sides have that many bytes, and every byte of `value` is initialised, to zero or
    // to the caller's.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.as_mut_ptr().cast::<u8>(), known.min(size));
        Ok(value.assume_init())
    }
}

/// Writes a struct whose first field is the size that the caller knows. That field is kept, and
/// bytes that only the caller knows become zero.
///
/// # Safety
/// `place` is NULL or points to as many writable bytes as its first field says.
pub(super) unsafe fn write_struct<T: Growing>(what: &str, place: *mut T, value: T) -> Result<()> {
    let place = out(what, place)?;
    // SAFETY: the caller's contract: the first field is there.
    let size = unsafe { place.cast::<usize>().read_unaligned() };
    check_size(what, size, T::FIRST_SIZE)?;
    let place = place.as_ptr().cast::<u8>();
    let both = size.min(size_of::<T>());
    // SAFETY: `size` bytes are writable by the caller's word, `both` is within them and within T;
    // the size field, which comes first, is left alone.
    unsafe {
        let from = size_of::<usize>();
        let value = std::ptr::from_ref(&value).cast::<u8>();
        std::ptr::copy_nonoverlapping(value.add(from), place.add(from), both - from);
        std::ptr::write_bytes(place.add(both), 0, size - both);
    }
    Ok(())
}

/// Checks that a struct can be written by [`write_struct`], before there is anything to write.
///
/// # Safety
/// The conditions of [`write_struct`] hold.
pub(super) unsafe fn check_struct<T: Growing>(what: &str, place: *mut T) -> Result<()> {
    let place = out(what, place)?;
    // SAFETY: the caller's contract: the first field is there.
    check_size(what, unsafe { place.cast::<usize>().read_unaligned() }, T::FIRST_SIZE)
}

fn check_size(what: &str, size: usize, least: usize) -> Result<()> {
    // The structs begin with a size_t, so every sizeof is a multiple of it; any other size would
    // cut a pointer in two.
    let wrong = match size {
        // A header of an earlier release may have had a shorter struct.
        size if (size_of::<usize>()..least).contains(&size) => {
            format!("but the struct has at least {least} bytes in version {}", env!("CARGO_PKG_VERSION"))
        }
        size if size < least => format!("but the struct has at least {least} bytes"),
        size if size > MAX_STRUCT_SIZE => format!("but no struct has more than {MAX_STRUCT_SIZE} bytes"),
        size if size % size_of::<usize>() != 0 => format!("which is no multiple of {}", size_of::<usize>()),
        _ => return Ok(()),
    };
    Err(Error::invalid(format!("{what}.struct_size is {size}, {wrong}: set it to sizeof, or use the INIT macro")))
}

/// Refuses flags that this library does not know.
pub(super) fn check_flags(what: &str, flags: u32, known: u32) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        unknown => Err(Error::invalid(format!("{what}.flags has unknown bits {unknown:#x}; known are {known:#x}"))),
    }
}

/// A timeout in milliseconds; 0 is the default.
pub(super) fn timeout(what: &str, millis: i64) -> Result<Option<Duration>> {
    milliseconds(what, millis, "a timeout is in milliseconds, 0 for the default")
}

/// A time in milliseconds. `meaning` says in the message what the number means, and what 0 does.
pub(super) fn milliseconds(what: &str, millis: i64, meaning: &str) -> Result<Option<Duration>> {
    match u64::try_from(millis) {
        Ok(0) => Ok(None),
        Ok(millis) => Ok(Some(Duration::from_millis(millis))),
        Err(_) => Err(Error::invalid(format!("{what} is {millis}; {meaning}"))),
    }
}

/// Gives a list to the caller: its length always, its values when they fit.
///
/// # Safety
/// `buffer` is NULL or points to `capacity` writable values, `len_out` is NULL or writable.
pub(super) unsafe fn give_list<T: Copy>(
    what: &str,
    values: &[T],
    buffer: *mut T,
    capacity: usize,
    len_out: *mut usize,
) -> Result<()> {
    // SAFETY: the caller's contract.
    unsafe { check_room(what, values.len(), buffer, capacity, len_out)? };
    if !values.is_empty() {
        // SAFETY: `capacity` values are writable and there are no more than that.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), buffer, values.len()) };
    }
    Ok(())
}

/// Does what [`give_list`] does, with values that are made one by one. No list of them is made
/// here, however many there are.
///
/// # Safety
/// The conditions of [`give_list`] hold.
pub(super) unsafe fn give_each<T: Copy>(
    what: &str,
    len: usize,
    values: impl Iterator<Item = T>,
    buffer: *mut T,
    capacity: usize,
    len_out: *mut usize,
) -> Result<()> {
    // SAFETY: the caller's contract.
    unsafe { check_room(what, len, buffer, capacity, len_out)? };
    for (index, value) in values.take(len).enumerate() {
        // SAFETY: `capacity` values are writable, and `len` is no more than that.
        unsafe { buffer.add(index).write(value) };
    }
    Ok(())
}

/// Gives a list's length to the caller.
///
/// # Safety
/// `len_out` is NULL or writable.
pub(super) unsafe fn give_len(len: usize, len_out: *mut usize) -> Result<()> {
    let len_out = out("len_out", len_out)?;
    // SAFETY: not NULL, and writable by the caller's word.
    unsafe { len_out.write(len) };
    Ok(())
}

/// Gives a list's length to the caller, and fails when the list does not fit. A caller can check
/// before it makes the list, which may have as many elements as the world has ranks.
///
/// # Safety
/// The conditions of [`give_list`] hold.
pub(super) unsafe fn check_room<T>(
    what: &str,
    len: usize,
    buffer: *mut T,
    capacity: usize,
    len_out: *mut usize,
) -> Result<()> {
    // SAFETY: the caller's contract.
    unsafe { give_len(len, len_out)? };
    if len > capacity {
        return Err(Error::new(
            Status::BufferTooSmall,
            format!("{what} holds {capacity} elements, but the answer has {len}"),
        ));
    }
    if len > 0 { out(what, buffer).map(drop) } else { Ok(()) }
}

/// Gives a string to the caller; the length counts the NUL.
///
/// # Safety
/// The conditions of [`give_list`] hold.
pub(super) unsafe fn give_text(
    what: &str,
    text: &str,
    buffer: *mut c_char,
    capacity: usize,
    len_out: *mut usize,
) -> Result<()> {
    let bytes: Vec<u8> = text.bytes().filter(|byte| *byte != 0).chain([0]).collect();
    // SAFETY: the caller's contract; a char is a byte.
    unsafe { give_list(what, &bytes, buffer.cast::<u8>(), capacity, len_out) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A struct that has grown since the first release.
    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Grown {
        struct_size: usize,
        first: u64,
        later: u64,
    }

    // SAFETY: repr(C), a size first, integers otherwise.
    unsafe impl Growing for Grown {
        const FIRST_SIZE: usize = 16;
    }

    #[test]
    fn a_caller_of_the_first_release_has_zero_for_what_came_later() {
        let old = [16usize, 7];
        // SAFETY: as many bytes as it says.
        let read = unsafe { read_struct("options", old.as_ptr().cast::<Grown>()) }.unwrap();
        assert_eq!(read, Grown { struct_size: 16, first: 7, later: 0 });
        let shorter = [15usize, 7];
        // SAFETY: refused by its first field.
        let error = unsafe { read_struct("options", shorter.as_ptr().cast::<Grown>()) }.unwrap_err();
        assert!(error.message().contains("at least 16 bytes"), "{error}");
    }

    #[test]
    fn what_an_old_caller_does_not_have_is_not_written() {
        let mut place = [16usize, 0, 0x5a];
        let value = Grown { struct_size: 0, first: 7, later: 9 };
        // SAFETY: as many bytes as it says, and more.
        unsafe { write_struct("info_out", place.as_mut_ptr().cast::<Grown>(), value) }.unwrap();
        assert_eq!(place, [16, 7, 0x5a]);
        let mut newer = [32usize, 1, 1, 1];
        // SAFETY: as above.
        unsafe { write_struct("info_out", newer.as_mut_ptr().cast::<Grown>(), value) }.unwrap();
        assert_eq!(newer, [32, 7, 9, 0]);
    }
}
