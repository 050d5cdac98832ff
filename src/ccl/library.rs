//! One communicator library: its name, its version and its functions, with results turned into errors that carry them.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::time::Duration;

use hostccl::types::NCCL_SHRINK_ABORT;
use libloading::os::unix::Library as Handle;

use super::call_name::CallName;
use super::config::CommConfig;
use super::driver::{CurrentDevice, supported};
use super::types::{NcclResult, UniqueId, result};
use crate::error::{Error, Result, Status};

/// A raw `ncclComm_t`: a pointer that only its own library understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct RawComm(pub *mut c_void);

// SAFETY: the pointer is only handed to its library, whose functions may be called from any thread; what must not run at
// the same time on one communicator is said where it is called.
unsafe impl Send for RawComm {}
// SAFETY: as above.
unsafe impl Sync for RawComm {}

impl RawComm {
    /// No communicator.
    pub const NULL: RawComm = RawComm(std::ptr::null_mut());

    /// Whether there is no communicator.
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }
}

/// The signatures of nccl.h, by field. `Option` is for what some release or implementation lacks.
pub(super) struct Functions {
    pub(super) get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> NcclResult,
    pub(super) init_rank_config: unsafe extern "C" fn(*mut RawComm, c_int, UniqueId, c_int, *mut c_void) -> NcclResult,
    pub(super) init_rank_scalable:
        Option<unsafe extern "C" fn(*mut RawComm, c_int, c_int, c_int, *mut UniqueId, *mut c_void) -> NcclResult>,
    pub(super) split: Option<unsafe extern "C" fn(RawComm, c_int, c_int, *mut RawComm, *mut c_void) -> NcclResult>,
    pub(super) shrink:
        Option<unsafe extern "C" fn(RawComm, *mut c_int, c_int, *mut RawComm, *mut c_void, c_int) -> NcclResult>,
    pub(super) finalize: Option<unsafe extern "C" fn(RawComm) -> NcclResult>,
    pub(super) destroy: unsafe extern "C" fn(RawComm) -> NcclResult,
    pub(super) abort: unsafe extern "C" fn(RawComm) -> NcclResult,
    pub(super) get_async_error: unsafe extern "C" fn(RawComm, *mut NcclResult) -> NcclResult,
    pub(super) count: unsafe extern "C" fn(RawComm, *mut c_int) -> NcclResult,
    pub(super) user_rank: unsafe extern "C" fn(RawComm, *mut c_int) -> NcclResult,
    pub(super) get_error_string: unsafe extern "C" fn(NcclResult) -> *const c_char,
    pub(super) get_last_error: Option<unsafe extern "C" fn(RawComm) -> *const c_char>,
    pub(super) all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> NcclResult,
    pub(super) reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        c_int,
        RawComm,
        *mut c_void,
    ) -> NcclResult,
    pub(super) broadcast:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> NcclResult,
    pub(super) all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, RawComm, *mut c_void) -> NcclResult,
    pub(super) reduce_scatter:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> NcclResult,
    pub(super) all_to_all:
        Option<unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, RawComm, *mut c_void) -> NcclResult>,
    pub(super) send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, RawComm, *mut c_void) -> NcclResult,
    pub(super) recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> NcclResult,
    pub(super) group_start: unsafe extern "C" fn() -> NcclResult,
    pub(super) group_end: unsafe extern "C" fn() -> NcclResult,
    pub(super) host_lost_rank: Option<unsafe extern "C" fn(RawComm, *mut c_int) -> NcclResult>,
    pub(super) host_set_timeout: Option<unsafe extern "C" fn(RawComm, i64) -> NcclResult>,
    pub(super) host_next_call_name: Option<unsafe extern "C" fn(u64, *const c_char) -> NcclResult>,
    pub(super) host_set_names: Option<unsafe extern "C" fn(RawComm, *const c_int, c_int) -> NcclResult>,
    pub(super) host_refuse: Option<unsafe extern "C" fn(RawComm, *const c_char) -> NcclResult>,
    pub(super) host_wait: Option<unsafe extern "C" fn(RawComm, i64, *mut NcclResult) -> NcclResult>,
}

/// A communicator library.
pub struct Library {
    name: String,
    version: i32,
    pub(super) functions: Functions,
    /// How a symbol's address is found later on; `None` in the embedded engine. Never closed: NCCL leaves threads behind that run its code, one for
    /// each id that nobody used.
    handle: Option<ManuallyDrop<Handle>>,
}

/// `ncclGetVersion` of the oldest release that has the core, and of the first whose failed initialisation may leave its thread inside a group.
const OLDEST: i32 = 21_400;
const LEAVES_GROUPS_OPEN: i32 = 22_300;

impl Library {
    /// Fills the table through `lookup` (a symbol's address by name, as dlsym). The core must be there: `ncclGetVersion`,
    /// `ncclGetUniqueId`, `ncclCommInitRankConfig` (2.14), destroy, abort, the queries, five collectives, send, recv and groups.
    pub(super) fn from_lookup(name: &str, lookup: impl Fn(&str) -> Option<*const c_void>) -> Result<Library> {
        let mut version = 0;
        let missing = |symbol: &str, version| {
            let is =
                if version == 0 { "it is not NCCL".to_owned() } else { format!("it says NCCL {}", dotted(version)) };
            Error::new(Status::Library, format!("{name} has no symbol {symbol}: {is}"))
        };
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the address is that of the C function of this name, whose signature nccl.h fixes and the field
                // it goes into repeats.
                lookup($name).filter(|address| !address.is_null()).map(|address| unsafe { std::mem::transmute(address) })
            };
            ($name:literal, core) => {
                symbol!($name).ok_or_else(|| missing($name, version))?
            };
        }
        let get_version: unsafe extern "C" fn(*mut c_int) -> NcclResult = symbol!("ncclGetVersion", core);
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
        let functions = Functions {
            get_unique_id: symbol!("ncclGetUniqueId", core),
            init_rank_config: symbol!("ncclCommInitRankConfig", core),
            init_rank_scalable: symbol!("ncclCommInitRankScalable"),
            split: symbol!("ncclCommSplit"),
            shrink: symbol!("ncclCommShrink"),
            finalize: symbol!("ncclCommFinalize"),
            destroy: symbol!("ncclCommDestroy", core),
            abort: symbol!("ncclCommAbort", core),
            get_async_error: symbol!("ncclCommGetAsyncError", core),
            count: symbol!("ncclCommCount", core),
            user_rank: symbol!("ncclCommUserRank", core),
            get_error_string: symbol!("ncclGetErrorString", core),
            get_last_error: symbol!("ncclGetLastError"),
            all_reduce: symbol!("ncclAllReduce", core),
            reduce: symbol!("ncclReduce", core),
            broadcast: symbol!("ncclBroadcast", core),
            all_gather: symbol!("ncclAllGather", core),
            reduce_scatter: symbol!("ncclReduceScatter", core),
            all_to_all: symbol!("ncclAlltoAll"),
            send: symbol!("ncclSend", core),
            recv: symbol!("ncclRecv", core),
            group_start: symbol!("ncclGroupStart", core),
            group_end: symbol!("ncclGroupEnd", core),
            host_lost_rank: symbol!("hostcclCommLostRank"),
            host_set_timeout: symbol!("hostcclCommSetTimeout"),
            host_next_call_name: symbol!("hostcclNextCallName"),
            host_set_names: symbol!("hostcclCommSetNames"),
            host_refuse: symbol!("hostcclCommRefuse"),
            host_wait: symbol!("hostcclCommWait"),
        };
        Ok(Library { name: name.to_owned(), version, functions, handle: None })
    }

    /// The same library, holding the loader's handle so that it stays loaded and later lookups work.
    pub(super) fn keep(mut self, handle: Handle) -> Library {
        self.handle = Some(ManuallyDrop::new(handle));
        self
    }

    /// What to call it in messages: a path, a SONAME, or the embedded engine.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `ncclGetVersion`: 22707 is 2.27.7.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// What it is in messages: "libnccl.so.2 (NCCL 2.27.7)".
    pub fn label(&self) -> String {
        format!("{} ({})", self.name, self.release())
    }

    /// Its release, which must be the same on all ranks: "NCCL 2.27.7".
    pub fn release(&self) -> String {
        format!("NCCL {}", dotted(self.version))
    }

    /// Whether both are the same code in this process, and so share their groups: two tables are made where two worlds name one library.
    pub(crate) fn is_same(&self, other: &Library) -> bool {
        self.functions.group_start as usize == other.functions.group_start as usize
    }

    /// Whether it is AMD's, whose devices the program chooses itself (hipSetDevice).
    pub fn is_rccl(&self) -> bool {
        self.name.rsplit('/').next().is_some_and(|file| file.starts_with("librccl"))
    }

    /// Whether this is our host engine, embedded or as libhostccl.so: host memory, no device, no streams.
    pub fn is_host_engine(&self) -> bool {
        self.functions.host_lost_rank.is_some()
    }

    /// Whether operations are put on a stream. Then those of a non-blocking communicator may return before they are there.
    pub fn has_streams(&self) -> bool {
        !self.is_host_engine()
    }

    /// Whether ranks can meet by more than one id: `ncclCommInitRankScalable` (2.23). The host engine has it, but one id serves all.
    pub(crate) fn takes_several_ids(&self) -> bool {
        self.functions.init_rank_scalable.is_some() && !self.is_host_engine()
    }

    /// Whether child communicators can be split off a parent.
    pub(crate) fn can_split(&self) -> bool {
        self.functions.split.is_some()
    }

    /// Whether a communicator can go on without some of its ranks; else what to do instead.
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
        if self.is_host_engine() { Ok(CurrentDevice::NONE) } else { CurrentDevice::of_this_thread() }
    }

    /// The address of any function of the library, by its C name.
    pub fn symbol(&self, name: &str) -> Option<*const c_void> {
        match &self.handle {
            None => hostccl::symbol(name),
            // SAFETY: the address is handed on, not called.
            Some(handle) => unsafe {
                handle.get::<*const c_void>(name.as_bytes()).ok().map(|address| address.into_raw().cast_const())
            },
        }
    }

    /// A fresh id for one communicator. It is one-shot.
    pub(crate) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId { bytes: [0; 128] };
        // SAFETY: the out-parameter is a valid ncclUniqueId.
        self.check("ncclGetUniqueId", RawComm::NULL, unsafe { (self.functions.get_unique_id)(&mut id) })?;
        Ok(id)
    }

    /// Gives up an id that nobody else has seen. The host engine holds memory for it until a communicator comes of it: so one does, of this rank
    /// alone, and ends.
    pub(crate) fn discard(&self, id: &UniqueId) {
        let mut config = CommConfig::unset(self.version).blocking(true);
        if !self.is_host_engine() {
            return;
        }
        if let Ok(comm) = self.init_rank(1, &[*id], 0, &mut config) {
            let _ = self.abort(comm);
        }
    }

    /// Starts `ncclCommInitRankConfig`, or with several ids `ncclCommInitRankScalable`; with a non-blocking config the communicator is ready
    /// when [`poll`](Library::poll) says so.
    pub(crate) fn init_rank(
        &self,
        size: usize,
        ids: &[UniqueId],
        rank: usize,
        config: &mut CommConfig,
    ) -> Result<RawComm> {
        let mut comm = RawComm::NULL;
        let (size, rank, count) = (int(size), int(rank), int(ids.len()));
        match (ids, self.functions.init_rank_scalable) {
            ([id], _) => {
                // SAFETY: `comm` is NULL-initialised and valid; the config outlives the call, which copies it.
                let code =
                    unsafe { (self.functions.init_rank_config)(&mut comm, size, *id, rank, config.as_mut_ptr()) };
                self.started("ncclCommInitRankConfig", comm, code)
            }
            (ids, Some(init)) => {
                let mut ids = ids.to_vec();
                // SAFETY: as above; the ids are `count`, and the call copies them.
                let code = unsafe { init(&mut comm, size, rank, count, ids.as_mut_ptr(), config.as_mut_ptr()) };
                self.started("ncclCommInitRankScalable", comm, code)
            }
            _ => Err(Error::internal(format!("{} was given {count} ids", self.label()))),
        }
    }

    /// The communicator whose making began with `code`; nothing of it where that is an error.
    fn started(&self, call: &str, comm: RawComm, code: NcclResult) -> Result<RawComm> {
        let Err(error) = self.check(call, RawComm::NULL, code) else { return Ok(comm) };
        if !comm.is_null() {
            let _ = self.abort(comm);
        } else if code == result::UNHANDLED_CUDA_ERROR && !self.is_host_engine() && self.version >= LEAVES_GROUPS_OPEN {
            // Where it cannot ask for the current device it returns from inside its own group, and what this thread does next would only be
            // put off. Without such a group this is one more refused call.
            let _ = self.group_end();
        }
        Err(error)
    }

    /// Starts `ncclCommSplit` of a parent with nothing outstanding. The child's handle is written to `child` by the time
    /// [`poll`](Library::poll) of the *parent* says that it is done.
    ///
    /// # Safety
    /// `child` is valid and stays where it is until then.
    pub(crate) unsafe fn split(
        &self,
        parent: RawComm,
        color: i32,
        key: i32,
        child: *mut RawComm,
        config: &mut CommConfig,
    ) -> Result<()> {
        let Some(split) = self.functions.split else {
            return Err(Error::unsupported(format!("{} has no ncclCommSplit", self.label())));
        };
        self.name_next_call(&CallName::OF_MAKING);
        // SAFETY: the parent is live (its owner calls), `child` is a valid out-parameter that the caller keeps in place.
        let code = unsafe { split(parent, color, key, child, config.as_mut_ptr()) };
        self.check("ncclCommSplit", parent, code)
    }

    /// Starts `ncclCommShrink` with NCCL_NCCL_SHRINK_ABORT: what is under way on the parent ends, and the ranks that are not `excluded` get a child. Its
    /// handle is written as by [`split`](Library::split), after which the parent can only be aborted.
    ///
    /// # Safety
    /// As for [`split`](Library::split).
    pub(crate) unsafe fn shrink(
        &self,
        parent: RawComm,
        excluded: &mut [i32],
        child: *mut RawComm,
        config: &mut CommConfig,
    ) -> Result<()> {
        self.check_can_shrink()?;
        let Some(shrink) = self.functions.shrink else { return Ok(()) };
        let count = int(excluded.len());
        // SAFETY: the parent is live (its owner calls), the list has that many ranks (NCCL sorts it in place and copies it), and `child` is a valid
        // out-parameter that the caller keeps in place.
        let code =
            unsafe { shrink(parent, excluded.as_mut_ptr(), count, child, config.as_mut_ptr(), NCCL_SHRINK_ABORT) };
        self.check("ncclCommShrink", parent, code)
    }

    /// `ncclCommGetAsyncError`: `Ok(true)` when nothing is in progress any more, `Ok(false)` while something is.
    pub(crate) fn poll(&self, comm: RawComm) -> Result<bool> {
        let mut state = result::SUCCESS;
        // SAFETY: the communicator is live and the out-parameter valid.
        self.check("ncclCommGetAsyncError", comm, unsafe { (self.functions.get_async_error)(comm, &mut state) })?;
        if state == result::IN_PROGRESS {
            return Ok(false);
        }
        self.check("the communicator", comm, state).map(|()| true)
    }

    /// Starts `ncclCommFinalize` where the library has it: flushes what is outstanding.
    pub(crate) fn finalize(&self, comm: RawComm) -> Result<()> {
        match self.functions.finalize {
            // SAFETY: the communicator is live.
            Some(finalize) => self.check("ncclCommFinalize", comm, unsafe { finalize(comm) }),
            None => Ok(()),
        }
    }

    /// `ncclCommDestroy`: frees a communicator whose ranks are all leaving in order.
    pub(crate) fn destroy(&self, comm: RawComm) -> Result<()> {
        // SAFETY: the owner calls this once and forgets the handle.
        self.check("ncclCommDestroy", RawComm::NULL, unsafe { (self.functions.destroy)(comm) })
    }

    /// `ncclCommAbort`: ends what is in flight and frees.
    pub(crate) fn abort(&self, comm: RawComm) -> Result<()> {
        // SAFETY: the owner calls this once and forgets the handle.
        self.check("ncclCommAbort", RawComm::NULL, unsafe { (self.functions.abort)(comm) })
    }

    /// Number of ranks and this process's rank in a communicator.
    pub(crate) fn size_and_rank(&self, comm: RawComm) -> Result<(usize, usize)> {
        let (mut size, mut rank) = (0, 0);
        // SAFETY: the communicator is live by the caller's word, the out-parameters are valid.
        self.check("ncclCommCount", comm, unsafe { (self.functions.count)(comm, &mut size) })?;
        // SAFETY: as above.
        self.check("ncclCommUserRank", comm, unsafe { (self.functions.user_rank)(comm, &mut rank) })?;
        match (usize::try_from(size), usize::try_from(rank)) {
            (Ok(size), Ok(rank)) if rank < size => Ok((size, rank)),
            _ => Err(Error::new(Status::Ccl, format!("{} says rank {rank} of {size} ranks", self.name))),
        }
    }

    /// The rank of the communicator that the host engine found dead, where known; `None` in other libraries.
    pub(crate) fn lost_rank(&self, comm: RawComm) -> Option<usize> {
        let mut rank = -1;
        // SAFETY: the communicator is live, the out-parameter valid.
        let code = unsafe { (self.functions.host_lost_rank?)(comm, &mut rank) };
        if code == result::SUCCESS { usize::try_from(rank).ok() } else { None }
    }

    /// How long a call on this communicator, its making included, may wait for its peers, at least a millisecond; only the host engine
    /// blocks in them.
    pub(crate) fn set_timeout(&self, comm: RawComm, millis: u64) -> Result<()> {
        let millis = i64::try_from(millis.max(1)).unwrap_or(i64::MAX);
        match self.functions.host_set_timeout {
            // SAFETY: the communicator is live.
            Some(set) => self.check("hostcclCommSetTimeout", comm, unsafe { set(comm, millis) }),
            None => Ok(()),
        }
    }

    /// What the host engine's messages call the ranks of this communicator, one number for each.
    pub fn set_names(&self, comm: RawComm, names: &[i32]) -> Result<()> {
        match (self.functions.host_set_names, c_int::try_from(names.len())) {
            (Some(set), Ok(count)) => {
                // SAFETY: the communicator is live, and there are as many names as it says.
                let code = unsafe { set(comm, names.as_ptr(), count) };
                self.check("hostcclCommSetNames", comm, code)
            }
            _ => Ok(()),
        }
    }

    /// For a rank that is inside `call` and makes no collectives on this communicator any more: the host engine ends it where another rank waits in one.
    /// Fails where it has done so, or the communicator has failed before.
    pub fn refuse(&self, comm: RawComm, call: &str) -> Result<()> {
        let Some(refuse) = self.functions.host_refuse else { return Ok(()) };
        let text = CString::new(call.replace('\0', "")).unwrap_or_default();
        // SAFETY: the host engine refuses a communicator that has ended meanwhile, and the text outlives the call.
        self.check(call, comm, unsafe { refuse(comm, text.as_ptr()) })
    }

    /// Lets `pause` pass between two looks at a communicator. The host engine can tell when nothing is in progress on it any more: there it waits for
    /// that, for two milliseconds at most whatever `pause` is, so that a deadline may be overrun by as much.
    pub(crate) fn rest(&self, comm: RawComm, pause: Duration) {
        let mut state = result::SUCCESS;
        // SAFETY: the host engine refuses a communicator that has ended meanwhile, and the out-parameter is valid.
        match self.functions.host_wait.map(|wait| unsafe { wait(comm, 2, &mut state) }) {
            Some(result::SUCCESS) => {}
            _ => std::thread::sleep(pause),
        }
    }

    /// `ncclGroupStart`, for the calling thread. Through [`View::group_start`](crate::comm::View::group_start), which keeps count.
    pub(crate) fn group_start(&self) -> Result<()> {
        // SAFETY: no arguments.
        self.check("ncclGroupStart", RawComm::NULL, unsafe { (self.functions.group_start)() })
    }

    /// Makes the group that the calling thread has open in the host engine fail at its end, before any of its operations runs. NCCL's is left as it is:
    /// what NCCL makes of a refused call differs from release to release.
    pub(crate) fn fail_group(&self) {
        if self.is_host_engine() {
            // SAFETY: an operation on no communicator is refused before it looks at anything.
            unsafe { self.all_reduce(ptr::null(), ptr::null_mut(), 0, 0, 0, RawComm::NULL, ptr::null_mut()) };
        }
    }

    /// `ncclGroupEnd`, for the calling thread.
    pub(crate) fn group_end(&self) -> Result<()> {
        // SAFETY: no arguments.
        self.check("ncclGroupEnd", RawComm::NULL, unsafe { (self.functions.group_end)() })
    }

    /// Success and "in progress" are fine (the communicator is polled later); anything else is an error with the
    /// library's own words.
    pub(crate) fn check(&self, call: &str, comm: RawComm, code: NcclResult) -> Result<()> {
        if code == result::SUCCESS || code == result::IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: the library returns a static string.
        let meaning = unsafe { text((self.functions.get_error_string)(code)) };
        let detail = match self.functions.get_last_error {
            // SAFETY: NULL is allowed, a communicator is live; the string is copied at once.
            Some(last) => unsafe { text(last(comm)) },
            None => String::new(),
        };
        let detail = if detail.is_empty() { detail } else { format!(": {detail}") };
        // The usual reason is a driver that is older than the runtime NCCL was built with.
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
        Err(Error::new(status, format!("{call} of {} gives {code} ({meaning}){detail}{driver}", self.name))
            .with_ccl_result(code))
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

fn int(value: usize) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
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
