//! The stores that the tests try: in memory, over TCP with and without a secret, each directly and
//! by a relay, in a folder, and by a program's callbacks.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use devicemesh::rendezvous::store::{
    CallbackStore, Callbacks, FileStore, MemoryStore, Relay, Secret, Server, Store, TcpStore,
};
use devicemesh::wait::Wait;

/// Returns a wait whose deadline no test reaches.
pub fn soon() -> Wait {
    Wait::after(Duration::from_secs(20))
}

/// A store, and the things that must live as long as the store.
pub struct Subject {
    pub store: Arc<dyn Store>,
    /// The relay ends before its server.
    _relay: Option<Relay>,
    _server: Option<Server>,
    folder: Option<Arc<FileStore>>,
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            folder.remove();
        }
    }
}

/// Returns a fresh store of each kind.
pub fn subjects() -> Vec<Subject> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let server = Server::bind("127.0.0.1:0").unwrap();
    let tcp = TcpStore::connect("127.0.0.1", server.local_addr().port(), &soon()).unwrap();
    let secret = Secret::new(b"secret");
    let guarded = Server::guarded("127.0.0.1:0", secret.clone()).unwrap();
    let port = guarded.local_addr().port();
    let encrypted = TcpStore::connect_with_secret("127.0.0.1", port, secret.clone(), &soon()).unwrap();
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = format!("{}/store-{}-{number}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
    let folder = Arc::new(FileStore::open(Path::new(&path)).unwrap());
    let plain = |store: Arc<dyn Store>| Subject { store, _relay: None, _server: None, folder: None };
    let served = |store, server| Subject { store: Arc::new(store), _relay: None, _server: Some(server), folder: None };
    vec![
        plain(Arc::new(MemoryStore::new())),
        served(tcp, server),
        served(encrypted, guarded),
        by_relay(None),
        by_relay(secret),
        Subject { store: folder.clone(), _relay: None, _server: None, folder: Some(folder) },
        // SAFETY: the functions below keep the promises, and the table is never freed.
        plain(Arc::new(unsafe { CallbackStore::new(callbacks(Table::leaked())) }.unwrap())),
        // SAFETY: as above.
        plain(Arc::new(unsafe { CallbackStore::new(deciding_callbacks(Table::leaked())) }.unwrap())),
    ]
}

/// Returns a store that is reached by a relay.
fn by_relay(secret: Option<Secret>) -> Subject {
    let server = Server::guarded("127.0.0.1:0", secret.clone()).unwrap();
    let relay = Relay::start("127.0.0.1", server.local_addr().port(), secret.clone(), &soon()).unwrap().unwrap();
    let store = TcpStore::connect_with_secret("127.0.0.1", relay.local_addr().port(), secret, &soon()).unwrap();
    Subject { store: Arc::new(store), _relay: Some(relay), _server: Some(server), folder: None }
}

/// The store behind the callbacks, as a program may have it.
#[derive(Default)]
pub struct Table {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
    /// How many times the callback `drop` was called.
    pub dropped: AtomicU32,
}

impl Table {
    pub fn leaked() -> &'static Table {
        Box::leak(Box::default())
    }
}

/// Returns the callbacks of a program that keeps its keys in the table.
pub fn callbacks(table: &'static Table) -> Callbacks {
    /// # Safety
    /// `data` is a leaked table, `key` a string.
    unsafe fn parts(data: *mut c_void, key: *const c_char) -> (&'static Table, String) {
        // SAFETY: the caller's contract.
        unsafe { (&*data.cast::<Table>(), CStr::from_ptr(key).to_str().unwrap().to_owned()) }
    }
    unsafe extern "C" fn set(data: *mut c_void, key: *const c_char, value: *const c_void, len: usize) -> i32 {
        // SAFETY: as the store promises.
        let ((table, key), value) = unsafe { (parts(data, key), std::slice::from_raw_parts(value.cast::<u8>(), len)) };
        table.values.lock().unwrap().insert(key, value.to_vec());
        table.changed.notify_all();
        0
    }
    unsafe extern "C" fn get(
        data: *mut c_void,
        key: *const c_char,
        value: *mut c_void,
        capacity: usize,
        len_out: *mut usize,
        timeout_ms: i64,
    ) -> i32 {
        // SAFETY: as the store promises.
        let (table, key) = unsafe { parts(data, key) };
        let wait = Duration::from_millis(timeout_ms as u64);
        let values = table.values.lock().unwrap();
        let (values, _) = table.changed.wait_timeout_while(values, wait, |values| !values.contains_key(&key)).unwrap();
        let Some(found) = values.get(&key) else { return devicemesh::ffi::DM_STORE_NOT_YET };
        // SAFETY: at most `capacity` bytes are written.
        unsafe {
            len_out.write(found.len());
            std::ptr::copy_nonoverlapping(found.as_ptr(), value.cast::<u8>(), found.len().min(capacity));
        }
        0
    }
    unsafe extern "C" fn add(data: *mut c_void, key: *const c_char, amount: i64, value_out: *mut i64) -> i32 {
        // SAFETY: as the store promises.
        let (table, key) = unsafe { parts(data, key) };
        let mut values = table.values.lock().unwrap();
        let before: i64 = values.get(&key).map_or(0, |value| std::str::from_utf8(value).unwrap().parse().unwrap());
        values.insert(key, (before + amount).to_string().into_bytes());
        table.changed.notify_all();
        // SAFETY: a valid out-parameter.
        unsafe { value_out.write(before + amount) };
        0
    }
    unsafe extern "C" fn dropped(data: *mut c_void) {
        // SAFETY: a leaked table.
        unsafe { &*data.cast::<Table>() }.dropped.fetch_add(1, Ordering::SeqCst);
    }
    Callbacks {
        user_data: (table as *const Table).cast_mut().cast(),
        set: Some(set),
        get: Some(get),
        add: Some(add),
        drop: Some(dropped),
        remove: None,
        compare_set: None,
    }
}

/// Returns the callbacks of a program that keeps its keys in the table and can compare and set.
pub fn deciding_callbacks(table: &'static Table) -> Callbacks {
    unsafe extern "C" fn compare_set(
        data: *mut c_void,
        key: *const c_char,
        expected: *const c_void,
        expected_len: usize,
        value: *const c_void,
        len: usize,
        stands: *mut c_void,
        capacity: usize,
        len_out: *mut usize,
    ) -> i32 {
        // SAFETY: as the store promises.
        let (table, key, expected, value) = unsafe {
            (
                &*data.cast::<Table>(),
                CStr::from_ptr(key).to_str().unwrap().to_owned(),
                std::slice::from_raw_parts(expected.cast::<u8>(), expected_len),
                std::slice::from_raw_parts(value.cast::<u8>(), len),
            )
        };
        let mut values = table.values.lock().unwrap();
        if values.get(&key).map_or(&b""[..], |found| found) == expected {
            values.insert(key.clone(), value.to_vec());
            table.changed.notify_all();
        }
        let found = values.get(&key).cloned().unwrap_or_default();
        // SAFETY: at most `capacity` bytes are written.
        unsafe {
            len_out.write(found.len());
            std::ptr::copy_nonoverlapping(found.as_ptr(), stands.cast::<u8>(), found.len().min(capacity));
        }
        0
    }
    Callbacks { compare_set: Some(compare_set), ..callbacks(table) }
}
