//! The program files that a process has mapped: how to unwind their functions, and the functions'
//! names.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use addr2line::Loader;
use devicemesh::printable::printable;
use framehop::{
    CacheNative, ExplicitModuleSectionInfo, MayAllocateDuringUnwind, Module, UnwindRegsNative, Unwinder, UnwinderNative,
};
use object::read::{ReadCache, ReadRef};
use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol, SymbolKind};

use crate::proc;
use crate::words::cut;

/// A stack is cut after so many frames.
const MOST_FRAMES: usize = 48;

/// The symbol table of a larger file is not read.
const LARGEST: u64 = 256 << 20;
/// The name of a function is cut after so many characters.
const LONGEST_NAME: usize = 100;

/// A process's address space.
pub struct Modules {
    unwinder: UnwinderNative<Vec<u8>, MayAllocateDuringUnwind>,
    cache: CacheNative<MayAllocateDuringUnwind>,
    /// The memory of the process.
    memory: File,
    files: Vec<Mapped>,
}

/// A file that is mapped.
struct Mapped {
    /// The addresses in the process.
    range: Range<u64>,
    /// What must be added to an address in the file to get the address in the process.
    bias: u64,
    /// The path, as the process sees it.
    name: PathBuf,
    /// The path by which this tool reaches the file.
    path: PathBuf,
    /// Its functions' files and lines; read when the first one is asked for.
    lines: Option<Option<Loader>>,
    /// The addresses, sizes and names of its functions, in the order of the addresses; read when
    /// the first one is asked for.
    symbols: Option<Vec<(u64, u64, String)>>,
}

impl Modules {
    /// The files that a process has mapped. Fails where the process's memory may not be read.
    pub fn of(pid: u32) -> io::Result<Modules> {
        let folder = proc::folder(pid);
        let memory = File::open(format!("{folder}/mem"))?;
        let maps = fs::read_to_string(format!("{folder}/maps"))?;
        let mut modules =
            Modules { unwinder: UnwinderNative::new(), cache: CacheNative::new(), memory, files: Vec::new() };
        for (name, (range, first)) in ranges(&maps) {
            let path = inside(pid, name);
            if name == "[vdso]" {
                let bytes = modules.read(&range).unwrap_or_default();
                modules.add(&*bytes, range, first, name, path);
            } else if let Ok(file) = File::open(&path) {
                // Only the parts that are used are read: a file may have gigabytes.
                modules.add(&ReadCache::new(file), range, first, name, path);
            }
        }
        Ok(modules)
    }

    fn read(&self, range: &Range<u64>) -> Option<Vec<u8>> {
        let mut bytes = vec![0; (range.end - range.start).try_into().ok()?];
        self.memory.read_exact_at(&mut bytes, range.start).ok()?;
        Some(bytes)
    }

    /// Adds a file. `first` is where its beginning is mapped.
    fn add<'d>(&mut self, data: impl ReadRef<'d>, range: Range<u64>, first: u64, name: &str, path: PathBuf) {
        let Ok(file) = object::File::parse(data) else { return };
        let Some(lowest) = file.segments().map(|segment| segment.address().wrapping_sub(segment.file_range().0)).min()
        else {
            return;
        };
        let bias = first.wrapping_sub(lowest);
        let section = |name: &str| {
            let section = file.section_by_name(name)?;
            let range = section.address()..section.address().saturating_add(section.size());
            Some((range, section.uncompressed_data().ok()?.into_owned()))
        };
        let (frames, index) = (section(".eh_frame"), section(".eh_frame_hdr"));
        let address = |section: &Option<(Range<u64>, Vec<u8>)>| section.as_ref().map(|(range, _)| range.clone());
        let info = ExplicitModuleSectionInfo {
            base_svma: 0,
            eh_frame_svma: address(&frames),
            eh_frame_hdr_svma: address(&index),
            got_svma: address(&section(".got")),
            eh_frame: frames.map(|(_, bytes)| bytes),
            eh_frame_hdr: index.map(|(_, bytes)| bytes),
            debug_frame: section(".debug_frame").map(|(_, bytes)| bytes),
            ..ExplicitModuleSectionInfo::default()
        };
        self.unwinder.add_module(Module::new(name.to_owned(), range.clone(), bias, info));
        self.files.push(Mapped { range, bias, name: name.into(), path, lines: None, symbols: None });
    }

    /// The addresses of the functions of a stack, the innermost first. All but the first one are
    /// addresses to which a call returns.
    pub fn unwind(&mut self, counter: u64, registers: UnwindRegsNative) -> Vec<u64> {
        let memory = &self.memory;
        let mut read = |address: u64| {
            let mut word = [0; 8];
            memory.read_exact_at(&mut word, address).map(|()| u64::from_ne_bytes(word)).map_err(|_| ())
        };
        let mut frames = self.unwinder.iter_frames(counter, registers, &mut self.cache, &mut read);
        let mut addresses = Vec::new();
        while let Ok(Some(frame)) = frames.next() {
            addresses.push(frame.address_for_lookup());
            if addresses.len() == MOST_FRAMES {
                break;
            }
        }
        addresses
    }

    /// The name of the file of an address, without folders.
    pub fn file(&self, address: u64) -> Option<String> {
        let file = self.files.iter().find(|file| file.range.contains(&address))?;
        Some(printable(&file.name.file_name()?.to_string_lossy()).into_owned())
    }

    /// Returns the functions at an address, with their files and lines where the file has them. A
    /// function that the compiler has inlined into another one stands before that one.
    pub fn names(&mut self, address: u64) -> Vec<String> {
        let base = self.file(address);
        let Some(file) = self.files.iter_mut().find(|file| file.range.contains(&address)) else {
            return vec![format!("0x{address:x}")];
        };
        let base = base.unwrap_or_default();
        let probe = address.wrapping_sub(file.bias);
        let loader = file.lines.get_or_insert_with(|| Loader::new(&file.path).ok());
        let mut names = Vec::new();
        if let Some(loader) = loader {
            if let Ok(mut frames) = loader.find_frames(probe) {
                while let Ok(Some(frame)) = frames.next() {
                    let Some(function) = &frame.function else { continue };
                    let name = function.demangle().map_or("?".to_owned(), |name| name.into_owned());
                    let place = frame
                        .location
                        .and_then(|location| Some(format!("{}:{}", short(location.file?), location.line?)));
                    names.push(format!(
                        "{} at {}",
                        printable(&cut(&name, LONGEST_NAME)),
                        place.map_or(base.clone(), |place| printable(&place).into_owned())
                    ));
                }
            }
        }
        if let (true, Some(symbol)) = (names.is_empty(), file.symbol(probe)) {
            let name = addr2line::demangle_auto(symbol.into(), None);
            names.push(format!("{} in {base}", printable(&cut(&name, LONGEST_NAME))));
        }
        if names.is_empty() {
            names.push(format!("0x{probe:x} in {base}"));
        }
        names
    }
}

impl Mapped {
    /// The name of the function that has an address of the file.
    fn symbol(&mut self, address: u64) -> Option<&str> {
        let symbols = self.symbols.get_or_insert_with(|| symbols(&self.path));
        let before = symbols.partition_point(|(start, _, _)| *start <= address);
        let (start, size, name) = symbols.get(before.checked_sub(1)?)?;
        (address - start < *size).then_some(name.as_str())
    }
}

/// The functions of a file: their addresses, sizes and names.
fn symbols(path: &Path) -> Vec<(u64, u64, String)> {
    // The file is read as a whole, because each name would be two system calls otherwise.
    let is_small = fs::metadata(path).is_ok_and(|file| file.len() <= LARGEST);
    let Some(data) = is_small.then(|| fs::read(path).ok()).flatten() else { return Vec::new() };
    let Ok(file) = object::File::parse(&*data) else { return Vec::new() };
    let all = file.symbols().chain(file.dynamic_symbols()).filter(|symbol| symbol.kind() == SymbolKind::Text);
    let entry =
        |symbol: object::Symbol<'_, '_>| Some((symbol.address(), symbol.size(), symbol.name().ok()?.to_owned()));
    let mut symbols: Vec<(u64, u64, String)> = all.filter_map(entry).collect();
    symbols.sort();
    symbols
}

/// The last two parts of a path.
fn short(path: &str) -> String {
    let parts: Vec<&str> = path.rsplit('/').take(2).collect();
    parts.into_iter().rev().collect::<Vec<_>>().join("/")
}

/// The path of a file that a process names, which may have another root folder.
fn inside(pid: u32, name: &str) -> PathBuf {
    Path::new(&format!("{}/root", proc::folder(pid))).join(name.trim_start_matches('/'))
}

/// The files with executable parts: their ranges in the process, and where the beginning of the
/// file is mapped.
fn ranges(maps: &str) -> BTreeMap<&str, (Range<u64>, u64)> {
    let mut found: BTreeMap<&str, (Range<u64>, u64)> = BTreeMap::new();
    let mut executable = Vec::new();
    for line in maps.lines() {
        let mut fields = line.splitn(6, ' ');
        let (Some(range), Some(rights), Some(offset)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let name = fields.nth(2).unwrap_or_default().trim();
        let Some((start, end)) = range.split_once('-') else { continue };
        let number = |text| u64::from_str_radix(text, 16);
        let (Ok(start), Ok(end), Ok(offset)) = (number(start), number(end), number(offset)) else { continue };
        if name.is_empty() || name.starts_with('[') && name != "[vdso]" {
            continue;
        }
        if rights.contains('x') {
            executable.push(name);
        }
        let entry = found.entry(name).or_insert((start..end, start.wrapping_sub(offset)));
        entry.0 = entry.0.start.min(start)..entry.0.end.max(end);
    }
    found.retain(|name, _| executable.contains(name));
    found
}
