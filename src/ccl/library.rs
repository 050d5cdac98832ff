//! One communicator library: its name, its version and its functions. A result code becomes an
//! error that carries the code.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;

use libloading::os::unix::Library as Handle;

use super::blame::Blame;
use super::current_device::CurrentDevice;
use super::driver::supported;
use super::functions::{Functions, RawComm};
use super::hip::Hip;
use super::resolver::Resolver;
use super::types::{NcclResult, result};
use crate::error::{Error, Result, Status};

/// A communicator library.
pub struct Library {
    /// Its name in messages: a path, a SONAME, or the embedded engine.
    name: String,
    /// The name of the library as a C string, for C programs, which may read it for as long as a
    /// world has this library.
    c_name: CString,
    /// The number that `ncclGetVersion` gave.
    version: i32,
    /// The addresses of its functions.
    pub(super) functions: Functions,
    /// The HIP runtime that the library is linked to; `None` in NCCL and the host engine.
    hip: Option<Hip>,
    /// Where further symbols are found.
    source: Source,
    /// Whether the program has named this copy of the library.
    is_vouched: bool,
}

/// Where the functions of a library are found.
enum Source {
    /// The embedded host engine.
    Embedded,
    /// The loader's handle. It is never closed, because NCCL leaves threads behind that run its
    /// code, one for each id that nobody used.
    Loaded(ManuallyDrop<Handle>),
    /// The program, which has the library linked into itself.
    Program(Resolver),
}

/// `ncclGetVersion` of the oldest release that has the functions of the core.
const OLDEST: i32 = 21_400;

impl Library {
    /// Fills the table through `lookup`, which gives a symbol's address by its name, as dlsym
    /// does. The core must be there: `ncclGetVersion`, `ncclGetUniqueId`, `ncclCommInitRankConfig`
    /// (2.14), destroy, abort, the queries, five collectives, send, recv and groups.
    pub(super) fn from_lookup(name: &str, lookup: impl Fn(&str) -> Option<*const c_void>) -> Result<Library> {
        let mut version = 0;
        let missing = |symbol: &str, version: i32| {
            let is =
                if version == 0 { "it is not NCCL".to_owned() } else { format!("it says NCCL {}", dotted(version)) };
            Error::new(Status::Library, format!("{name} has no symbol {symbol}: {is}"))
        };
        let get_version = lookup("ncclGetVersion").filter(|address| !address.is_null());
        let get_version = get_version.ok_or_else(|| missing("ncclGetVersion", version))?;
        // SAFETY: the address is that of the C function of this name, whose signature nccl.h fixes.
        let get_version: unsafe extern "C" fn(*mut c_int) -> NcclResult = unsafe { std::mem::transmute(get_version) };
        // SAFETY: the out-parameter is a valid int.
        let code = unsafe { get_version(&mut version) };
        if code != result::SUCCESS {
            return Err(
                Error::new(Status::Library, format!("ncclGetVersion of {name} gives {code}")).with_ccl_result(code)
            );
        }
        if version < OLDEST {
            let (this, oldest) = (dotted(version), dotted(OLDEST));
            return Err(Error::new(Status::Library, format!("{name} is NCCL {this}, older than {oldest}")));
        }
        let functions = Functions::from_lookup(&lookup, |symbol| missing(symbol, version))?;
        let c_name = CString::new(name).unwrap_or_default();
        let (name, source) = (name.to_owned(), Source::Embedded);
        let mut library = Library { name, c_name, version, functions, hip: None, source, is_vouched: false };
        if !library.is_host_engine() {
            library.hip = Hip::of(&lookup);
        }
        Ok(library)
    }

    /// Keeps the loader's handle, so that the library stays loaded and later lookups work.
    pub(super) fn keep(mut self, handle: Handle) -> Library {
        self.source = Source::Loaded(ManuallyDrop::new(handle));
        self
    }

    /// Keeps the program's resolver for later lookups.
    pub(super) fn keep_resolver(mut self, resolver: Resolver) -> Library {
        self.source = Source::Program(resolver);
        self.is_vouched = true;
        self
    }

    /// Notes that the program has named this copy of the library, so communicators that the program
    /// has made may be taken for this copy's.
    pub(super) fn vouch(&mut self) {
        self.is_vouched = true;
    }

    /// Whether the program has named this copy of the library.
    pub(super) fn is_vouched(&self) -> bool {
        self.is_vouched
    }

    /// The library's name in messages: a path, a SONAME, or the embedded engine.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The library's name for C programs.
    pub(crate) fn c_name(&self) -> &CStr {
        &self.c_name
    }

    /// The file from which the library's code comes, as the dynamic loader names it.
    pub(crate) fn path(&self) -> String {
        let address = self.functions.group_start as *const c_void;
        // SAFETY: all fields of the struct are pointers, which may be NULL.
        let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: the address is only looked up, and `found` is writable.
        let is_known = unsafe { libc::dladdr(address, &raw mut found) } != 0;
        // SAFETY: the loader's string lives as long as the library, which is never unloaded.
        let path = if is_known { unsafe { text(found.dli_fname) } } else { String::new() };
        if path.is_empty() { "an unknown path".to_owned() } else { path }
    }

    /// The number that `ncclGetVersion` gave: 22707 is 2.27.7.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// The library with its release, for messages: "libnccl.so.2 (NCCL 2.27.7)".
    pub fn label(&self) -> String {
        format!("{} ({})", self.name, self.release())
    }

    /// The library's release, which must be equal on all ranks: "NCCL 2.27.7".
    pub fn release(&self) -> String {
        format!("NCCL {}", dotted(self.version))
    }

    /// Whether both tables lead to one copy of the library in this process, which then has one set
    /// of groups. Two worlds that name one library make two tables.
    pub(crate) fn is_same(&self, other: &Library) -> bool {
        self.functions.group_start as usize == other.functions.group_start as usize
    }

    /// Whether the library is AMD's. The program then chooses the device itself (hipSetDevice).
    pub fn is_rccl(&self) -> bool {
        self.name.rsplit('/').next().is_some_and(|file| file.starts_with("librccl")) || self.hip.is_some()
    }

    /// The HIP runtime that the library is linked to.
    pub(super) fn hip(&self) -> Option<Hip> {
        self.hip
    }

    /// Whether this is the host engine that is a part of this library.
    pub(crate) fn is_embedded(&self) -> bool {
        matches!(self.source, Source::Embedded)
    }

    /// Whether this is the host engine, embedded or as libhostccl.so. It works on host memory,
    /// without a device or streams.
    pub fn is_host_engine(&self) -> bool {
        self.functions.host_lost_rank.is_some()
    }

    /// Whether this is a host engine whose ranks may be on several hosts. Older ones work within
    /// one host.
    pub(crate) fn is_engine_for_several_hosts(&self) -> bool {
        self.functions.host_unique_id_for.is_some()
    }

    /// Whether operations are put on a stream. The operations of a non-blocking communicator may
    /// then return before they are on the stream.
    pub fn has_streams(&self) -> bool {
        !self.is_host_engine()
    }

    /// Whether ranks can meet by more than one id: `ncclCommInitRankScalable` (2.23). The host
    /// engine has it, but one id serves all.
    pub(crate) fn takes_several_ids(&self) -> bool {
        self.functions.init_rank_scalable.is_some() && !self.is_host_engine()
    }

    /// Whether child communicators can be split off a parent.
    pub(crate) fn can_split(&self) -> bool {
        self.functions.split.is_some()
    }

    /// Fails, saying what to do instead, when the library cannot shrink a communicator.
    pub(crate) fn check_can_shrink(&self) -> Result<()> {
        match self.functions.shrink {
            Some(_) => Ok(()),
            None => Err(Error::unsupported(format!(
                "{} (version {}) has no ncclCommShrink, which NCCL has from 2.27 on: end the mesh (dm_abort), join a new world of the ranks that are left, and make the mesh there",
                self.name, self.version
            ))),
        }
    }

    /// The calling thread's device, for another thread that makes a communicator in its place.
    pub(crate) fn current_device(&self) -> Result<CurrentDevice> {
        if self.is_host_engine() { Ok(CurrentDevice::NONE) } else { CurrentDevice::of_this_thread(self.hip) }
    }

    /// The address of any function of the library, by its C name.
    pub fn symbol(&self, name: &str) -> Option<*const c_void> {
        match &self.source {
            Source::Embedded => hostccl::symbol(name),
            // SAFETY: the address is handed on, not called.
            Source::Loaded(handle) => unsafe {
                handle.get::<*const c_void>(name.as_bytes()).ok().map(|address| address.into_raw().cast_const())
            },
            Source::Program(resolver) => resolver.find(name),
        }
    }

    /// Does what [`symbol`](Library::symbol) does; `DM_STATUS_NOT_FOUND` where there is none.
    pub(crate) fn required_symbol(&self, name: &str) -> Result<*const c_void> {
        self.symbol(name).ok_or_else(|| Error::not_found(format!("{} has no symbol {name}", self.label())))
    }

    /// Turns a result code into an error with the library's own words. Success and "in progress"
    /// are no errors: a communicator in progress is polled later.
    pub(crate) fn check(&self, call: &str, comm: RawComm, code: NcclResult) -> Result<()> {
        if code == result::SUCCESS || code == result::IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: the library returns a static string.
        let meaning = unsafe { text((self.functions.get_error_string)(code)) };
        // The text may belong to an earlier error of this thread, where the code does not come from
        // the library.
        let blame = Blame::last(&self.functions);
        let is_stale = blame.as_ref().is_some_and(|blame| blame.code != code);
        let detail = match self.functions.get_last_error {
            // SAFETY: NULL is allowed, a communicator is live; the string is copied at once.
            Some(last) if !is_stale => unsafe { text(last(comm)) },
            _ => String::new(),
        };
        let detail = if detail.is_empty() { detail } else { format!(": {detail}") };
        // The usual reason is a driver that is older than the CUDA runtime with which NCCL was
        // built.
        let driver = match code {
            result::UNHANDLED_CUDA_ERROR if !self.is_host_engine() => supported(),
            _ => None,
        };
        let driver = driver.map_or_else(String::new, |version| format!("; the driver supports CUDA {version}"));
        let status = match code {
            result::REMOTE_ERROR => Status::PeerLost,
            result::TIMEOUT => Status::Timeout,
            _ => Status::Ccl,
        };
        let error = Error::new(status, format!("{call} of {} gives {code} ({meaning}){detail}{driver}", self.name))
            .with_ccl_result(code);
        Err(match blame.filter(|_| !is_stale) {
            Some(Blame { ranks, waited: Some(waited), .. }) => error.blaming(ranks).after_waiting(waited),
            Some(Blame { ranks, .. }) => error.blaming(ranks),
            None => error,
        })
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("name", &self.name).field("version", &self.version).finish_non_exhaustive()
    }
}

/// `ncclGetVersion`'s number as people write it: 22707 is 2.27.7, and 2803 (before 2.9) is 2.8.3.
fn dotted(version: i32) -> String {
    let unit = if version < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", version / unit, version % unit / 100, version % 100)
}

/// # Safety
/// `string` is NULL or a NUL-terminated string that lives through the call.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: not NULL, and the caller's contract.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::dotted;

    #[test]
    fn versions_are_written_as_nccl_writes_them() {
        assert_eq!([2803, 21_003, 21_400, 23_203].map(dotted), ["2.8.3", "2.10.3", "2.14.0", "2.32.3"]);
    }
}
