//! The caller's own key-value service as a store.

use std::collections::HashSet;
use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use once_cell::sync::Lazy;

use super::frame::MAX_VALUE;
use super::{Store, no_key};
use crate::error::{Error, Result};
use crate::wait::Wait;

/// How long one call of the caller's `get` may wait. The cancel flag is looked at between two
/// calls.
const SLICE: Duration = Duration::from_millis(50);
/// The number by which the caller's `get` says that the key did not come in time: DM_STORE_NOT_YET.
pub(crate) const NOT_YET: i32 = 100;
/// The size of the first buffer for a value, in bytes.
const FIRST_CAPACITY: usize = 64 << 10;

/// The caller's functions; see `dm_store_callbacks`.
#[derive(Clone, Copy)]
#[allow(missing_docs, reason = "documented at dm_store_callbacks")]
pub struct Callbacks {
    pub user_data: *mut c_void,
    pub set: Option<unsafe extern "C" fn(*mut c_void, *const c_char, *const c_void, usize) -> i32>,
    pub get: Option<unsafe extern "C" fn(*mut c_void, *const c_char, *mut c_void, usize, *mut usize, i64) -> i32>,
    pub add: Option<unsafe extern "C" fn(*mut c_void, *const c_char, i64, *mut i64) -> i32>,
    pub drop: Option<unsafe extern "C" fn(*mut c_void)>,
    pub remove: Option<unsafe extern "C" fn(*mut c_void, *const c_char) -> i32>,
    pub compare_set: Option<CompareSet>,
}

/// `dm_store_callbacks.compare_set`: user data, key, expected value, new value, and the buffer for
/// the value that stands, with its capacity and the length of the value.
pub(crate) type CompareSet = unsafe extern "C" fn(
    *mut c_void,
    *const c_char,
    *const c_void,
    usize,
    *const c_void,
    usize,
    *mut c_void,
    usize,
    *mut usize,
) -> i32;

/// A store made of the caller's functions.
pub struct CallbackStore {
    /// The first argument of every function.
    user_data: *mut c_void,
    /// Stores a value.
    set: unsafe extern "C" fn(*mut c_void, *const c_char, *const c_void, usize) -> i32,
    /// Waits for a value, and returns it.
    get: unsafe extern "C" fn(*mut c_void, *const c_char, *mut c_void, usize, *mut usize, i64) -> i32,
    /// Adds to a counter.
    add: unsafe extern "C" fn(*mut c_void, *const c_char, i64, *mut i64) -> i32,
    /// This function is called when the store is dropped.
    drop: Option<unsafe extern "C" fn(*mut c_void)>,
    /// Removes a key.
    remove: Option<unsafe extern "C" fn(*mut c_void, *const c_char) -> i32>,
    /// Replaces a value if it is the expected one.
    compare_set: Option<CompareSet>,
    /// Whether a world was made with this store. Only then does `drop` have to be called.
    kept: AtomicBool,
}

// SAFETY: the contract of dm_store_callbacks: the functions may be called from any thread, several
// at once.
unsafe impl Send for CallbackStore {}
// SAFETY: as above.
unsafe impl Sync for CallbackStore {}

impl CallbackStore {
    /// Makes a store of these functions. `set`, `get` and `add` must be there.
    ///
    /// # Safety
    /// The functions do what `dm_store_callbacks` says for as long as the store lives.
    pub unsafe fn new(callbacks: Callbacks) -> Result<CallbackStore> {
        let missing = |name: &str| Error::invalid(format!("dm_store_callbacks.{name} is NULL"));
        Ok(CallbackStore {
            user_data: callbacks.user_data,
            set: callbacks.set.ok_or_else(|| missing("set"))?,
            get: callbacks.get.ok_or_else(|| missing("get"))?,
            add: callbacks.add.ok_or_else(|| missing("add"))?,
            drop: callbacks.drop,
            remove: callbacks.remove,
            compare_set: callbacks.compare_set,
            kept: AtomicBool::new(false),
        })
    }

    /// Notes that the caller's `drop` must be called when the store is dropped, because a world
    /// was made with the store.
    pub fn keep(&self) {
        self.kept.store(true, Ordering::SeqCst);
    }

    /// Returns when no more than `owners` references to the store exist. This wait has no deadline.
    pub(crate) fn await_owners(self: &Arc<Self>, owners: usize) {
        while Arc::strong_count(self) > owners {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn key(&self, key: &str) -> Result<CString> {
        CString::new(key).map_err(|_| Error::store(format!("key {key:?} contains a NUL byte")))
    }

    fn failed(&self, function: &str, key: &str, code: i32) -> Error {
        Error::store(format!("dm_store_callbacks.{function} of key {key} returned {code}"))
    }

    /// Stores the value by the caller's `compare_set` where the key is not there, and returns the
    /// value that stands.
    fn set_if_absent(&self, compare_set: CompareSet, key: &str, value: &[u8], wait: &Wait) -> Result<Vec<u8>> {
        let (c_key, mut stands, mut len) = (self.key(key)?, vec![0u8; FIRST_CAPACITY], 0);
        // SAFETY: the expected value has length 0, the buffer has the capacity that is said, and
        // the caller's contract holds for the rest.
        let code = unsafe {
            compare_set(
                self.user_data,
                c_key.as_ptr(),
                [0u8; 1].as_ptr().cast(),
                0,
                value.as_ptr().cast(),
                value.len(),
                stands.as_mut_ptr().cast(),
                stands.len(),
                &mut len,
            )
        };
        match code {
            // The value was stored, or another one stands.
            0 if len == 0 && !value.is_empty() => Err(Error::store(format!(
                "dm_store_callbacks.compare_set of key {key} returned 0 and says that the key is not there (len_out 0): with expected_len 0 it must store the value"
            ))),
            0 if len > stands.len() => self.get(key, wait),
            0 => {
                stands.truncate(len);
                Ok(stands)
            }
            code => Err(self.failed("compare_set", key, code)),
        }
    }

    /// Calls the caller's `get` once, and again with a larger buffer when the value needs one.
    /// Returns `None` when the key did not come in time.
    fn get_once(&self, key: &CString, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let mut value = vec![0u8; FIRST_CAPACITY];
        loop {
            let mut len = 0;
            let millis = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
            // SAFETY: the buffer has the capacity that is said; the caller's contract for the rest.
            let code = unsafe {
                (self.get)(self.user_data, key.as_ptr(), value.as_mut_ptr().cast(), value.len(), &mut len, millis)
            };
            match code {
                0 => {}
                NOT_YET => return Ok(None),
                code => return Err(self.failed("get", &key.to_string_lossy(), code)),
            }
            if len > value.len() && len <= MAX_VALUE {
                value.resize(len, 0);
                continue;
            }
            if len > MAX_VALUE {
                return Err(Error::store(format!(
                    "dm_store_callbacks.get says that key {} has {len} bytes; at most {MAX_VALUE} are taken",
                    key.to_string_lossy()
                )));
            }
            value.truncate(len);
            return Ok(Some(value));
        }
    }
}

impl Store for CallbackStore {
    fn decides_at_once(&self) -> bool {
        self.compare_set.is_some()
    }

    fn set(&self, key: &str, value: &[u8], _wait: &Wait) -> Result<()> {
        let c_key = self.key(key)?;
        // SAFETY: the caller's contract.
        match unsafe { (self.set)(self.user_data, c_key.as_ptr(), value.as_ptr().cast(), value.len()) } {
            0 => Ok(()),
            code => Err(self.failed("set", key, code)),
        }
    }

    fn get_any(&self, keys: &[&str], wait: &Wait) -> Result<(usize, Vec<u8>)> {
        let c_keys = keys.iter().map(|key| self.key(key)).collect::<Result<Vec<_>>>()?;
        let mut lookout = wait.lookout();
        loop {
            wait.cancel.check()?;
            lookout.look()?;
            let over = wait.deadline.passed();
            let slice =
                if over { Duration::ZERO } else { wait.deadline.left().min(SLICE).max(Duration::from_millis(1)) };
            let began = Instant::now();
            for (index, key) in c_keys.iter().enumerate() {
                // The first key is waited for. The other keys are only looked at.
                if let Some(value) = self.get_once(key, if index == 0 { slice } else { Duration::ZERO })? {
                    return Ok((index, value));
                }
            }
            if over {
                return Err(no_key(self, keys[0], wait));
            }
            // The function has waited as long as it was told, so the key is not there yet. A
            // function that returns at once is slowed down, and the wait ends at the deadline.
            std::thread::sleep(Duration::from_millis(2).saturating_sub(began.elapsed()));
        }
    }

    fn try_get(&self, key: &str, _wait: &Wait) -> Result<Option<Vec<u8>>> {
        self.get_once(&self.key(key)?, Duration::ZERO)
    }

    fn add(&self, key: &str, amount: i64, _wait: &Wait) -> Result<i64> {
        let c_key = self.key(key)?;
        let mut sum = 0;
        // SAFETY: the caller's contract; the out-parameter is valid.
        match unsafe { (self.add)(self.user_data, c_key.as_ptr(), amount, &mut sum) } {
            0 => Ok(sum),
            code => Err(self.failed("add", key, code)),
        }
    }

    /// Where the caller has no `compare_set`, the first rank that adds to a counter beside the key
    /// may set the key. If that rank dies between the two operations, the key never gets a value:
    /// no other rank may set it, because a rank that is only slow would later replace the value
    /// that the others have read. The others then wait until their deadline, or until they learn
    /// that the rank is lost.
    fn set_once(&self, key: &str, value: &[u8], wait: &Wait) -> Result<Vec<u8>> {
        if let Some(compare_set) = self.compare_set {
            return self.set_if_absent(compare_set, key, value, wait);
        }
        if self.add(&owner(key), 1, wait)? == 1 {
            if self.remove.is_some() {
                owned().insert(key.to_owned());
            }
            self.set(key, value, wait)?;
            return Ok(value.to_vec());
        }
        self.get(key, wait)
    }

    fn present(&self, keys: &[String], wait: &Wait) -> Result<Vec<bool>> {
        keys.iter().map(|key| Ok(self.try_get(key, wait)?.is_some())).collect()
    }

    fn delete(&self, key: &str, _wait: &Wait) -> Result<()> {
        let Some(remove) = self.remove else { return Ok(()) };
        let owner = owned().remove(key).then(|| owner(key));
        for key in [key].into_iter().chain(owner.as_deref()) {
            let key = self.key(key)?;
            // SAFETY: the caller's contract.
            unsafe { remove(self.user_data, key.as_ptr()) };
        }
        Ok(())
    }

    fn name(&self) -> &str {
        "the caller's store"
    }
}

/// Returns the keys that this process was the first to set, where keys can be removed. The counter
/// beside such a key ([`owner`]) is removed together with the key. The set belongs to the process
/// and not to a store, because a rank may remove a key through another store, in its next world.
fn owned() -> MutexGuard<'static, HashSet<String>> {
    static OWNED: Lazy<Mutex<HashSet<String>>> = Lazy::new(Mutex::default);
    OWNED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the counter beside a key, which says which rank was the first to set the key.
fn owner(key: &str) -> String {
    format!("{key}#owner")
}

impl Drop for CallbackStore {
    fn drop(&mut self) {
        if let Some(drop) = self.drop.filter(|_| self.kept.load(Ordering::SeqCst)) {
            // SAFETY: the caller's contract; this is the last use of its data.
            unsafe { drop(self.user_data) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn set(_: *mut c_void, _: *const c_char, _: *const c_void, _: usize) -> i32 {
        0
    }

    unsafe extern "C" fn get(_: *mut c_void, _: *const c_char, _: *mut c_void, _: usize, _: *mut usize, _: i64) -> i32 {
        NOT_YET
    }

    unsafe extern "C" fn add(_: *mut c_void, _: *const c_char, _: i64, _: *mut i64) -> i32 {
        0
    }

    /// Stores nothing, and says so.
    unsafe extern "C" fn compare_set(
        _: *mut c_void,
        _: *const c_char,
        _: *const c_void,
        _: usize,
        _: *const c_void,
        _: usize,
        _: *mut c_void,
        _: usize,
        len_out: *mut usize,
    ) -> i32 {
        // SAFETY: the store passes a place that it owns.
        unsafe { len_out.write(0) };
        0
    }

    #[test]
    fn a_compare_set_that_stores_nothing_is_a_failure_of_the_store() {
        let callbacks = Callbacks {
            user_data: std::ptr::null_mut(),
            set: Some(set),
            get: Some(get),
            add: Some(add),
            drop: None,
            remove: None,
            compare_set: Some(compare_set),
        };
        // SAFETY: the functions touch nothing but the place of a length.
        let store = unsafe { CallbackStore::new(callbacks) }.unwrap();
        let error = store.set_once("key", b"value", &Wait::after(Duration::from_secs(1))).unwrap_err();
        let text = "dm_store_callbacks.compare_set of key key returned 0";
        assert!(error.status() == crate::error::Status::Store && error.message().contains(text), "{error}");
    }
}
