//! Under what name a call is issued.

use std::ffi::c_char;

use crate::digest::Fnv1a;

/// What tells calls along different dimensions apart where these share one communicator: the same on all ranks of the call. The host engine
/// lets each name pair for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallName {
    tag: u64,
    /// The dimension's name for messages, cut to fit, filled up with zeros.
    text: [u8; 32],
}

impl CallName {
    /// That of a call which has none.
    pub(crate) const NONE: CallName = CallName { tag: 0, text: [0; 32] };
    /// That of the calls that make communicators of others.
    pub(crate) const OF_MAKING: CallName =
        CallName { tag: u64::MAX, text: *b"new communicators\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" };

    /// That of a dimension of the mesh with that id, from its name and the sizes and strides of its layout.
    pub(crate) fn new(mesh: &str, name: &str, pairs: &[(usize, usize)]) -> CallName {
        let digest = Fnv1a::default().text(mesh).text(name);
        let digest =
            pairs.iter().fold(digest, |digest, (size, stride)| digest.number(*size as u64).number(*stride as u64));
        let mut end = name.len().min(31);
        while !name.is_char_boundary(end) {
            end -= 1;
        }
        let mut text = [0; 32];
        text[..end].copy_from_slice(&name.as_bytes()[..end]);
        CallName { tag: digest.value().max(1), text }
    }

    /// The 32 bytes of its text.
    pub(super) fn text(&self) -> *const c_char {
        self.text.as_ptr().cast()
    }

    /// What tells it from others; 0 for none.
    pub(crate) fn tag(&self) -> u64 {
        self.tag
    }
}

impl Default for CallName {
    fn default() -> CallName {
        CallName::NONE
    }
}
