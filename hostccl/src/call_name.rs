//! The names of calls.
//!
//! Threads that share a communicator issue their calls under different names, so that the ranks can
//! tell the calls apart. A caller names its next call with `hostcclNextCallName`.

use std::cell::Cell;

/// The length of a name's field in bytes. A shorter name is filled up with zeros.
pub(crate) const NAME_BYTES: usize = 32;

/// The name under which a call is issued. It is the same on all ranks of the call.
// A name is copied in pieces of 16 bytes. A processor reads quickly what it has just written only
// where the read lies within one write. The text is written in such pieces, so it comes first. If
// the tag of 8 bytes came first, each piece of the copy would hold parts of two writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Name {
    /// The name for messages, filled up with zeros.
    pub(crate) text: [u8; NAME_BYTES],
    /// The number that tells names apart.
    pub(crate) tag: u64,
}

/// The tag of calls without a name. No caller can choose this tag.
const UNNAMED: u64 = NO_TAG - 1;
/// The value that no tag has. The word of a place with several calls holds this value.
pub(crate) const NO_TAG: u64 = u64::MAX;

thread_local! {
    /// The name of this thread's next call.
    static NEXT: Cell<Name> = const { Cell::new(Name::NONE) };
}

impl Name {
    /// The name of a call to which the caller gave none.
    pub(crate) const NONE: Name = Name { tag: UNNAMED, text: [0; NAME_BYTES] };

    /// Whether the caller gave no name.
    pub(crate) fn is_none(&self) -> bool {
        self.tag == UNNAMED
    }

    /// Names the calling thread's next call. The tag 0 stands for no name. Returns whether a caller
    /// may choose the tag. Otherwise the next call has the tag of calls without a name.
    #[inline]
    pub(crate) fn set_next(tag: u64, text: &[u8; NAME_BYTES]) -> bool {
        let is_free = tag < UNNAMED;
        NEXT.set(Name { tag: if tag == 0 || !is_free { UNNAMED } else { tag }, text: *text });
        is_free
    }

    /// Returns the name of the call that the calling thread is about to begin. The call after that
    /// has no name unless it gets one.
    pub(crate) fn take_next() -> Name {
        NEXT.replace(Name::NONE)
    }

    /// Returns the text " along tp", or nothing for a call without a name.
    pub(crate) fn along(&self) -> String {
        let text = self.text.split(|byte| *byte == 0).next().unwrap_or_default();
        match String::from_utf8_lossy(text) {
            text if text.is_empty() => String::new(),
            text => format!(" along {text}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tag_is_a_name_of_its_own_or_is_refused() {
        for tag in [1, 2, 3, u64::MAX - 3, u64::MAX - 2] {
            assert!(Name::set_next(tag, &[7; NAME_BYTES]));
            let name = Name::take_next();
            assert!(name.tag == tag && !name.is_none(), "{tag:#x}: {name:?}");
        }
        for tag in [u64::MAX - 1, u64::MAX] {
            assert!(!Name::set_next(tag, &[7; NAME_BYTES]));
            assert!(Name::take_next().is_none());
        }
        assert!(Name::set_next(0, &[0; NAME_BYTES]));
        assert!(Name::take_next().is_none());
    }
}
