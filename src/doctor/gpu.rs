//! GPU detection: searches for the driver's library, queries the first device, and tests whether
//! the driver loads the bundle of machine code.

use crate::plan::counted;
use serde::Serialize;
use std::{
    fmt,
    path::{Path, PathBuf},
};
use tilewright_cuda::{
    CHECK_VARIABLE, Context,
    cache::{BUNDLE_FOLDER, BundleContent, Driver, Settings},
    checks_from_environment,
};

const LIBRARY: &str = "libcuda.so.1";
/// Folders of distributions and containers, for libraries missing from the loader's cache.
const FOLDERS: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/run/opengl-driver/lib",
];

/// The state of the first GPU.
#[derive(Serialize)]
pub(super) struct Gpu {
    /// Path of the driver's library.
    driver: Option<String>,
    /// Whether the first GPU is usable.
    backend: bool,
    /// The first GPU, if usable.
    device: Option<Device>,
    /// Why it is not usable.
    why: Option<String>,
    /// Folder of the kernel cache.
    cache: Option<PathBuf>,
}

/// The first GPU.
#[derive(Serialize)]
struct Device {
    name: String,
    /// Compute capability: 90 is `sm_90`.
    arch: u32,
    multiprocessors: u32,
    /// The CUDA version of the driver: 13000 is 13.0.
    driver: u32,
    /// Free and total bytes of device memory.
    free_memory: usize,
    memory: usize,
}

impl Device {
    fn open() -> tilewright_cuda::Result<Self> {
        let context = Context::open(0)?;
        let (free_memory, memory) = context.free_memory()?;
        let limits = context.properties();
        let (arch, multiprocessors, driver) = (limits.arch, limits.multiprocessors, limits.driver);
        Ok(Self { name: limits.name.clone(), arch, multiprocessors, driver, free_memory, memory })
    }
}

/// Searches for the library and queries the driver.
pub(super) fn find() -> Gpu {
    let cache = Settings::from_environment().ok().and_then(|settings| settings.folder().map(Path::to_owned));
    let (device, why) = match Device::open() {
        Ok(device) => (Some(device), None),
        Err(why) => (None, Some(why.to_string())),
    };
    Gpu { driver: library(), backend: device.is_some(), device, why, cache }
}

/// The driver of the first GPU, if usable.
pub(super) fn first_driver() -> Option<Driver> {
    Some(Driver::of(&Context::open(0).ok()?))
}

/// The checked mode, for display.
pub(super) fn checks() -> String {
    match checks_from_environment() {
        Ok(true) => format!("on ({CHECK_VARIABLE})"),
        Ok(false) => format!("off ({CHECK_VARIABLE}=1 verifies the arguments of operators on a GPU)"),
        Err(why) => why.to_string(),
    }
}

/// Searches like the loader: `LD_LIBRARY_PATH`, the loader's cache, standard folders.
fn library() -> Option<String> {
    let search_path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let cache = std::fs::read("/etc/ld.so.cache").unwrap_or_default();
    let in_folders = |folders: &mut dyn Iterator<Item = &str>| {
        let mut files =
            folders.filter(|folder| !folder.is_empty()).map(|folder| format!("{folder}/{LIBRARY}"));
        files.find(|file| Path::new(file).exists())
    };
    in_folders(&mut search_path.split(':'))
        .or_else(|| in_cache(&cache))
        .or_else(|| in_folders(&mut FOLDERS.into_iter()))
}

/// The library's path among the NUL-terminated strings of the loader's cache.
fn in_cache(cache: &[u8]) -> Option<String> {
    let strings = cache.split(|&byte| byte == 0).filter_map(|string| std::str::from_utf8(string).ok());
    let mut paths = strings.filter(|string| string.starts_with('/'));
    paths.find(|path| path.rsplit('/').next() == Some(LIBRARY)).map(str::to_owned)
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(device) = &self.device {
            return device.fmt(f);
        }
        match (&self.driver, &self.why) {
            (Some(path), Some(why)) => write!(f, "NVIDIA driver found, {path}, but {why}")?,
            (Some(path), None) => write!(f, "NVIDIA driver found, {path}")?,
            (None, _) => write!(f, "no NVIDIA driver, {LIBRARY} is in none of the usual places")?,
        }
        f.write_str("; the CPU backend will run")
    }
}

impl Gpu {
    /// The folder of the kernel cache, for display.
    pub(super) fn cache(&self) -> String {
        self.cache.as_ref().map_or("nowhere".to_owned(), |folder| folder.display().to_string())
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gibibytes = |bytes: usize| bytes as f64 / (1_u64 << 30) as f64;
        write!(
            f,
            "{}, sm_{}, {} SMs, {:.1} of {:.1} GiB free, driver for CUDA {}.{}; for `generate --device cuda`",
            self.name,
            self.arch,
            self.multiprocessors,
            gibibytes(self.free_memory),
            gibibytes(self.memory),
            self.driver / 1000,
            self.driver % 1000 / 10
        )
    }
}

/// A bundle, or the reason why there is none.
#[derive(Serialize)]
pub(super) struct Bundle {
    folder: Option<PathBuf>,
    kernels: usize,
    damaged: usize,
    targets: Vec<String>,
    assemblers: Vec<String>,
    /// Why it is not used: it is missing, or the driver refuses its code.
    why: Option<String>,
}

/// Reads the bundle in `folder`, by default that beside the program.
pub(super) fn find_bundle(folder: Option<&Path>) -> Bundle {
    let settings = Settings::from_environment().ok();
    let beside = || settings.as_ref()?.optional_bundle_folder().map(Path::to_owned);
    let folder = folder.map(Path::to_owned).or_else(beside);
    let mut content = BundleContent::default();
    let why = match folder.as_deref().map(BundleContent::read) {
        None => Some("the cache is off".to_owned()),
        Some(Err(why)) => Some(why.to_string()),
        Some(Ok(found)) => {
            content = found;
            first_driver().and_then(|driver| driver.refusal(&content))
        }
    };
    let BundleContent { kernels, damaged, targets, assemblers, .. } = content;
    let list = |set: std::collections::BTreeSet<String>| set.into_iter().collect();
    Bundle { folder, kernels, damaged, targets: list(targets), assemblers: list(assemblers), why }
}

impl fmt::Display for Bundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(folder) = self.folder.as_ref().filter(|_| self.kernels + self.damaged > 0) else {
            return write!(f, "none; `tilewright kernels bundle` makes {BUNDLE_FOLDER} beside a program");
        };
        let (kernels, targets) = (counted(self.kernels, "kernel"), self.targets.join(", "));
        write!(f, "{}: {kernels} for {targets} by {}", folder.display(), self.assemblers.join(", "))?;
        if self.damaged > 0 {
            write!(f, "; {} damaged", counted(self.damaged, "file"))?;
        }
        match &self.why {
            Some(why) => write!(f, "; the driver refuses them and compiles kernels itself: {why}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::in_cache;

    #[test]
    fn the_loader_cache_contains_the_driver_path() {
        let cache = |path: &str| format!("glibc-ld.so.cache1.1\u{1}\0libcuda.so.1\0{path}\0/lib/libc.so.6\0");
        let found = in_cache(cache("/usr/lib64/libcuda.so.1").as_bytes());
        assert_eq!(found.as_deref(), Some("/usr/lib64/libcuda.so.1"));
        assert_eq!(in_cache(cache("/usr/lib64/libcuda.so.10").as_bytes()), None);
        assert_eq!(in_cache(b"\xff\xfe"), None);
    }
}
