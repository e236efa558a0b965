//! Kernel source, and the lookup of its machine code: in bundles, in the cache folder, by the assembler.

use super::{
    Assembler, Cache, CacheError, Code, Folder, KernelKey, Lookup, MissingKernel, Mode, Origin, Result,
};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, atomic::Ordering::Relaxed},
};
use tilewright_ptx::{Invalid, Kernel, text};

/// A kernel's PTX and its target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    name: String,
    configuration: String,
    target: String,
    ptx: String,
    key: KernelKey,
}

impl Source {
    /// The kernel `name` (its PTX entry) for `target`, the architecture as assemblers spell it, for example `sm_90a`.
    ///
    /// `target` may be newer than the `.target` of the text.
    pub fn new(name: impl Into<String>, target: impl Into<String>, ptx: impl Into<String>) -> Self {
        let (name, target, ptx) = (name.into(), target.into(), ptx.into());
        let key = KernelKey::of(&target, &ptx);
        Self { name, configuration: String::new(), target, ptx, key }
    }

    /// A kernel for compute capability `arch`: 90 is `sm_90`, or `sm_90a` if the kernel uses architecture-specific instructions.
    ///
    /// # Errors
    /// If the architecture lacks one of its instructions.
    pub fn of(kernel: &Kernel, arch: u32) -> std::result::Result<Self, Invalid> {
        let text = text::ptx(kernel, arch)?;
        let suffix = if kernel.since().specific { "a" } else { "" };
        Ok(Self::new(kernel.name.as_str(), format!("sm_{arch}{suffix}"), text))
    }

    /// Same, with a description of the configuration for messages. The key does not include it.
    #[must_use]
    pub fn configured(mut self, configuration: impl Into<String>) -> Self {
        self.configuration = configuration.into();
        self
    }

    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The description of its configuration; empty if the name is sufficient.
    pub fn configuration(&self) -> &str {
        &self.configuration
    }

    /// The target, for example `sm_90a`.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Its PTX.
    pub fn ptx(&self) -> &str {
        &self.ptx
    }

    /// The same without lines of the source, which determine no instruction and make up most of the machine code's size. It has the same
    /// key.
    #[must_use]
    pub fn without_source_lines(&self) -> Self {
        Self { ptx: text::without_source_lines(&self.ptx), ..self.clone() }
    }

    /// Its key independent of the assembler, as bundles use it.
    pub fn key(&self) -> KernelKey {
        self.key
    }
}

/// Code with its source.
type FoundCode = (Arc<Code>, Origin);

impl Cache {
    /// The machine code of a kernel.
    ///
    /// # Errors
    /// [`CacheError::Assembler`], or [`CacheError::Missing`] if assembling is disabled.
    pub fn code(&self, source: &Source, assembler: &dyn Assembler) -> Result<Arc<Code>> {
        let key = source.key().assembled_by(assembler.identity());
        Ok(self.single_flight.run_once(key, || self.find(source, key, assembler))?.0)
    }

    /// Passes a kernel's machine code to `load` and returns its result. If `load` rejects code from a bundle or from the cache,
    /// and `invalid` attributes the error to the code (for example a driver older than the code), the next source is used: the cache
    /// after bundles, then the assembler.
    ///
    /// # Errors
    /// Errors of [`code`](Self::code), and of `load`.
    pub fn load<T, E: From<CacheError> + fmt::Display>(
        &self,
        source: &Source,
        assembler: &dyn Assembler,
        load: impl Fn(&Code) -> std::result::Result<T, E>,
        invalid: impl Fn(&E) -> bool,
    ) -> std::result::Result<T, E> {
        let key = source.key().assembled_by(assembler.identity());
        let mut found = self.single_flight.run_once(key, || self.find(source, key, assembler))?;
        loop {
            let (code, origin) = &found;
            let why = match load(code) {
                Err(why) if *origin != Origin::Assembler && invalid(&why) => {
                    format!("the device refused it: {why}")
                }
                outcome => return outcome,
            };
            self.single_flight.forget(key, code);
            let next = || {
                self.invalidate(*origin, key, source.name(), &why);
                let mut searched = vec![why.clone()];
                if *origin == Origin::Bundle
                    && let Some(code) = self.look_up(source, key, Origin::Cache, &mut searched)
                {
                    return Ok((code, Origin::Cache));
                }
                self.assemble(source, key, assembler, &searched)
            };
            found = self.single_flight.run_once(key, next)?;
        }
    }

    fn find(&self, source: &Source, key: KernelKey, assembler: &dyn Assembler) -> Result<FoundCode> {
        let mut searched = Vec::new();
        for (key, origin) in [(source.key(), Origin::Bundle), (key, Origin::Cache)] {
            if let Some(code) = self.look_up(source, key, origin, &mut searched) {
                return Ok((code, origin));
            }
        }
        self.assemble(source, key, assembler, &searched)
    }

    /// Looks up the code under `key` in the bundles or in the cache; adds the folders without it to `searched`.
    fn look_up(
        &self,
        source: &Source,
        key: KernelKey,
        origin: Origin,
        searched: &mut Vec<String>,
    ) -> Option<Arc<Code>> {
        let folders: &[Folder] =
            if origin == Origin::Bundle { &self.bundles } else { self.folder.as_slice() };
        for folder in folders {
            let using = origin == Origin::Cache && self.settings.mode == Mode::ReadWrite;
            let damage = match folder.lookup(key, using) {
                Lookup::Found(code) => {
                    self.counts[origin as usize].fetch_add(1, Relaxed);
                    return Some(Arc::new(code));
                }
                Lookup::Damaged(why) => {
                    self.invalidate(origin, key, source.name(), &why);
                    format!(" ({why})")
                }
                Lookup::Missing => String::new(),
            };
            searched.push(format!("{}{damage}", folder.path().display()));
        }
        None
    }

    fn assemble(
        &self,
        source: &Source,
        key: KernelKey,
        assembler: &dyn Assembler,
        searched: &[String],
    ) -> Result<FoundCode> {
        let [kernel, target] = [source.name(), source.target()].map(str::to_owned);
        if !self.settings.assemble {
            let (configuration, searched) = (source.configuration().to_owned(), searched.to_vec());
            return Err(CacheError::Missing(vec![MissingKernel { kernel, target, configuration, searched }]));
        }
        let code = assemble_code(source, assembler)?;
        self.counts[Origin::Assembler as usize].fetch_add(1, Relaxed);
        if let (Some(folder), Mode::ReadWrite) = (&self.folder, self.settings.mode)
            && let Err(why) = folder.write(key, &code).and_then(|()| folder.evict(self.settings.limit))
        {
            self.warn_once(&format!(
                "kernel cache: {}: {why}; kernels are assembled anew in each process",
                folder.path().display()
            ));
        }
        Ok((Arc::new(code), Origin::Assembler))
    }

    /// Counts an invalid entry. Removes it from the cache folder if that is writable; warns if it is in a bundle that was
    /// configured explicitly.
    fn invalidate(&self, origin: Origin, key: KernelKey, kernel: &str, why: &str) {
        self.counts[3].fetch_add(1, Relaxed);
        match (&self.folder, origin) {
            (_, Origin::Bundle) => {
                let text = format!("kernel {kernel} of a bundle is not used: {why}");
                if !self.settings.bundles.is_empty() {
                    self.warn_once(&text);
                }
                let _ = self.refusal.set(text); // the first one is kept
            }
            (Some(folder), _) if self.settings.mode == Mode::ReadWrite => folder.remove(key),
            _ => {}
        }
    }

    fn warn_once(&self, text: &str) {
        if !self.warned.swap(true, Relaxed) {
            (self.settings.warn)(text);
        }
    }
}

/// Assembles `source`.
pub(super) fn assemble_code(source: &Source, assembler: &dyn Assembler) -> Result<Code> {
    let [kernel, target] = [source.name(), source.target()].map(str::to_owned);
    match assembler.assemble(source) {
        Ok(cubin) => Ok(Code { kernel, target, assembler: assembler.identity().to_owned(), cubin }),
        Err(log) => Err(CacheError::Assembler { kernel, target, log }),
    }
}

type Slot = Arc<OnceLock<Result<FoundCode>>>;

/// Single-flight execution: concurrent requests for one key share one execution of the work.
///
/// Results are kept as long as the cache: a process has few kernels, of about 50 KB each. All waiting threads get the error of a
/// failed execution; the next request tries again.
#[derive(Debug, Default)]
pub(super) struct SingleFlight {
    slots: Mutex<HashMap<KernelKey, Slot>>,
}

impl SingleFlight {
    /// Runs `work`, or returns the result of an earlier or concurrent run for `key`.
    fn run_once(&self, key: KernelKey, work: impl FnOnce() -> Result<FoundCode>) -> Result<FoundCode> {
        let slot = Arc::clone(self.slots().entry(key).or_default());
        let outcome = slot.get_or_init(work).clone();
        if outcome.is_err() {
            self.slots().retain(|_, kept| !Arc::ptr_eq(kept, &slot));
        }
        outcome
    }

    /// Drops the result under `key` if it is `code`.
    fn forget(&self, key: KernelKey, code: &Arc<Code>) {
        let is_it = |slot: &Slot| matches!(slot.get(), Some(Ok((kept, _))) if Arc::ptr_eq(kept, code));
        self.slots().retain(|at, slot| *at != key || !is_it(slot));
    }

    /// The slots. Ignores poisoning: the map is consistent at every point where a thread can panic under this lock.
    fn slots(&self) -> MutexGuard<'_, HashMap<KernelKey, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::{KernelKey, Source};

    const TEXT: &str = ".version 7.0\n.target sm_80\n    .loc 1 5 3\n    ret;\n.file 1 \"a.rs\"\n";

    fn key(target: &str, ptx: &str) -> KernelKey {
        Source::new("k", target, ptx).key()
    }

    #[test]
    fn the_key_depends_on_everything_that_determines_the_code() {
        let mine = key("sm_80", TEXT);
        assert_eq!(mine, key("sm_80", TEXT));
        assert_ne!(mine, key("sm_86", TEXT));
        assert_ne!(mine, key("sm_80", &TEXT.replace("ret", "trap")));
        assert_ne!(key("a", "bc"), key("ab", "c"));
        let by = |identity| mine.assembled_by(identity);
        assert_ne!(by("driver 570"), by("driver 580"));
        assert_ne!(by("driver 570"), mine);
        assert_ne!(key("sm_86", TEXT).assembled_by("driver 570"), by("driver 570"));
    }

    #[test]
    fn the_key_ignores_line_information_and_configuration() {
        let moved = TEXT.replace("1 5 3", "1 6 3").replace("a.rs", "/home/me/a.rs");
        assert_eq!(key("sm_80", TEXT), key("sm_80", &moved));
        let configured = Source::new("k", "sm_80", TEXT).configured("causal");
        assert_eq!(configured.key(), key("sm_80", TEXT));
        let short = configured.without_source_lines();
        assert_eq!(short.ptx(), ".version 7.0\n.target sm_80\n    ret;\n");
        assert_eq!(key("sm_80", short.ptx()), short.key());
    }

    #[test]
    fn a_key_survives_a_round_trip() {
        let key = key("sm_80", TEXT);
        let text = key.to_string();
        assert_eq!(KernelKey::parse(&text), Some(key));
        assert_eq!(KernelKey::parse(&text.to_uppercase()), None);
        assert_eq!(KernelKey::parse(&text[1..]), None);
        assert_eq!(KernelKey::parse("README"), None);
    }
}
