//! Whether an NVIDIA driver is installed. Its library is looked for by name, neither linked nor loaded.

use serde::Serialize;
use std::{fmt, path::Path};

const LIBRARY: &str = "libcuda.so.1";
/// Where distributions and containers put it when the loader's cache does not know.
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

/// What there is of a GPU.
#[derive(Serialize)]
pub(super) struct Gpu {
    /// The driver's library.
    driver: Option<String>,
    /// Whether this version could use it.
    backend: bool,
}

/// Looks where the loader would: its search path, its cache, the usual folders.
pub(super) fn find() -> Gpu {
    let search_path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let cache = std::fs::read("/etc/ld.so.cache").unwrap_or_default();
    let in_folders = |folders: &mut dyn Iterator<Item = &str>| {
        let mut files =
            folders.filter(|folder| !folder.is_empty()).map(|folder| format!("{folder}/{LIBRARY}"));
        files.find(|file| Path::new(file).exists())
    };
    let driver = in_folders(&mut search_path.split(':'))
        .or_else(|| in_cache(&cache))
        .or_else(|| in_folders(&mut FOLDERS.into_iter()));
    Gpu { driver, backend: false }
}

/// The library's path among the strings of the loader's cache, which end in NUL.
fn in_cache(cache: &[u8]) -> Option<String> {
    let strings = cache.split(|&byte| byte == 0).filter_map(|string| std::str::from_utf8(string).ok());
    let mut paths = strings.filter(|string| string.starts_with('/'));
    paths.find(|path| path.rsplit('/').next() == Some(LIBRARY)).map(str::to_owned)
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.driver {
            Some(path) => write!(f, "NVIDIA driver found, {path}")?,
            None => write!(f, "no NVIDIA driver, {LIBRARY} is in none of the usual places")?,
        }
        f.write_str("; this version has no GPU backend, the CPU backend will run")
    }
}

#[cfg(test)]
mod tests {
    use super::in_cache;

    #[test]
    fn the_cache_names_the_driver_by_its_path() {
        let cache = |path: &str| format!("glibc-ld.so.cache1.1\u{1}\0libcuda.so.1\0{path}\0/lib/libc.so.6\0");
        let found = in_cache(cache("/usr/lib64/libcuda.so.1").as_bytes());
        assert_eq!(found.as_deref(), Some("/usr/lib64/libcuda.so.1"));
        assert_eq!(in_cache(cache("/usr/lib64/libcuda.so.10").as_bytes()), None);
        assert_eq!(in_cache(b"\xff\xfe"), None);
    }
}
