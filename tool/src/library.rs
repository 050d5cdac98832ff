//! Communicator libraries that the command line names (`--library`). A library's code runs in this
//! process, so naming one is unsafe in the crate's API. The user who starts the tool vouches for
//! the library, as with DM_CCL_LIBRARY and LD_PRELOAD.

#![expect(unsafe_code, reason = "naming a library is unsafe in the crate's API")]

use std::sync::Arc;

use devicemesh::ccl::{Library, named_or_usual};
use devicemesh::comm::WorldOptions;
use devicemesh::error::Result;

/// The library for device type cuda: the one that is named, else the one that the crate finds.
pub fn for_cuda(named: Option<&str>) -> Result<Arc<Library>> {
    // SAFETY: whoever starts the tool vouches for the library.
    unsafe { named_or_usual("cuda", named) }
}

/// The options of a world with the library that is named.
pub fn options_with(options: WorldOptions, named: Option<&str>) -> WorldOptions {
    match named {
        // SAFETY: whoever starts the tool vouches for the library.
        Some(library) => unsafe { options.library(library) },
        None => options,
    }
}
