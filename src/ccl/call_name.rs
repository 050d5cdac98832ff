//! The names under which calls are issued.

use std::ffi::c_char;

use crate::digest::Fnv1a;

/// The largest tag that `hostcclNextCallName` accepts.
const LARGEST_TAG: u64 = u64::MAX - 2;

/// The name of a call, equal on all ranks of the call. It tells the calls along different
/// dimensions apart that share one communicator: the host engine pairs only calls of equal names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallName {
    /// A digest of the parts of the name; 0 for a call without a name.
    tag: u64,
    /// The dimension's name for messages, cut to 31 bytes and filled up with zeros.
    text: [u8; 32],
}

impl CallName {
    /// The name of a call that needs no name.
    pub(crate) const NONE: CallName = CallName { tag: 0, text: [0; 32] };
    /// The name of the calls that make communicators from others.
    pub(crate) const OF_MAKING: CallName =
        CallName { tag: LARGEST_TAG, text: *b"new communicators\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" };

    /// The name of the calls along a dimension of the mesh with id `mesh`, from the dimension's
    /// name and the sizes and strides of its layout.
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
        CallName { tag: digest.value().clamp(1, LARGEST_TAG - 1), text }
    }

    /// The 32 bytes of the text.
    pub(super) fn text(&self) -> *const c_char {
        self.text.as_ptr().cast()
    }

    /// The number of the name; 0 for a call without a name.
    pub(crate) fn tag(&self) -> u64 {
        self.tag
    }
}

impl Default for CallName {
    fn default() -> CallName {
        CallName::NONE
    }
}
