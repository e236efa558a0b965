//! The Python package: `cargo xtask wheel` builds its wheels, `cargo xtask python-tests` tests it in an environment of its own, and
//! `cargo xtask flashinfer-tests` runs FlashInfer's own tests against it.

use crate::{
    cargo::{cargo, run},
    target, wheel_kernels,
};
use std::{
    ffi::OsStr,
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

const MANIFEST: &str = "crates/tilewright-python/Cargo.toml";
pub(crate) const TESTS: &str = "crates/tilewright-python/tests";
/// The distribution of the package `flashinfer`.
const AS_FLASHINFER: &str = "crates/tilewright-python/as-flashinfer";
/// The tools of the tests, and the libraries that they need.
pub(crate) const TEST_TOOLS: [&str; 4] =
    ["numpy>=1.24", "pytest>=8", "mypy>=1.13", "apache-tvm-ffi==0.1.15.post2"];
/// The tools of wheels, and the linker of released ones: it links with the symbols of an older glibc than that of the machine.
const WHEEL_TOOLS: [&str; 4] = [BUILDER, "hatchling>=1.25,<2", "ziglang==0.17.1", "wheel>=0.45"];
const BUILDER: &str = "maturin>=1.9,<2";
/// The oldest systems of released wheels: glibc 2.28, as in RHEL 8 and Debian 10.
const SYSTEMS: &str = "manylinux_2_28";
/// The maximum size of the wheel in bytes.
const LIMIT: u64 = 12 << 20;
/// The maximum time of an import in milliseconds.
const IMPORT_LIMIT: f64 = 50.0;
/// Prints the shortest of five imports in fresh interpreters, in milliseconds.
const IMPORT_TIME: &str = "import subprocess, sys
code = 'import time; t = time.perf_counter(); import tilewright; print((time.perf_counter() - t) * 1e3)'
print(min(float(subprocess.check_output([sys.executable, '-c', code])) for _ in range(5)))";

/// Files of FlashInfer's tests that concern this package. docs/from-flashinfer.md lists the others of these subjects with reasons.
pub(crate) fn suite() -> impl Iterator<Item = &'static str> {
    include_str!("../../crates/tilewright-python/tests/flashinfer_suite/files.txt").lines()
}

/// Builds the wheels of a release in `target/wheels/wheel`, or for another processor than the machine's in `target/wheels/<processor>`.
pub(crate) fn build(root: &Path, processor: Option<&str>) -> Result<(), String> {
    let processor = processor.unwrap_or(std::env::consts::ARCH);
    if !["x86_64", "aarch64"].contains(&processor) {
        return Err(format!("processor = {processor:?}, expected \"x86_64\" or \"aarch64\""));
    }
    let python = environment(root, &WHEEL_TOOLS)?;
    let wheel = released(root, &python, processor)?;
    wheel_kernels::add(root, &target(root), &python, &wheel)?;
    let bytes = fs::metadata(&wheel).map_err(|why| why.to_string())?.len();
    println!("{}: {:.1} MB", wheel.display(), bytes as f64 / 1e6);
    if bytes > LIMIT {
        return Err(format!("the wheel has {bytes} bytes, the limit is {LIMIT}"));
    }
    let folder = wheel.parent().unwrap_or(root);
    as_flashinfer(root, &python, folder)?;
    println!("{}: the distribution tilewright-as-flashinfer", folder.display());
    Ok(())
}

/// Builds the wheel of a release for Linux on `processor`; returns its path.
fn released(root: &Path, python: &Path, processor: &str) -> Result<PathBuf, String> {
    let triple = format!("{processor}-unknown-linux-gnu");
    let rustc = Command::new("rustc")
        .args(["--print", "target-libdir", "--target", &triple])
        .current_dir(root)
        .output()
        .map_err(|why| format!("`rustc` does not start: {why}"))?;
    if !Path::new(String::from_utf8_lossy(&rustc.stdout).trim()).is_dir() {
        return Err(format!(
            "the Rust target {triple} is not installed, expected it after `rustup target add {triple}`"
        ));
    }
    let folder = if processor == std::env::consts::ARCH { "wheel" } else { processor };
    let options = ["--zig", "--compatibility", SYSTEMS, "--target", &triple];
    wheel(root, python, "wheel", folder, &options)
}

/// Packs the source distribution, from which Rust and Python build the wheel, in `target/wheels/sdist`.
pub(crate) fn sdist(root: &Path) -> Result<(), String> {
    let python = environment(root, &WHEEL_TOOLS)?;
    let mut maturin = Command::new(python);
    maturin.args(["-m", "maturin", "sdist", "--manifest-path"]).arg(root.join(MANIFEST));
    run(maturin.arg("--out").arg(target(root).join("wheels/sdist")))
}

/// Builds the wheel of the package `flashinfer` in `folder`.
fn as_flashinfer(root: &Path, python: &Path, folder: &Path) -> Result<(), String> {
    let build = ["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"];
    let mut pip = Command::new(python);
    pip.args(build).arg("--no-build-isolation").arg("--wheel-dir").arg(folder).arg(root.join(AS_FLASHINFER));
    run(&mut pip)
}

/// Runs the Python tests on the library of the development profile. Without Python 3 or its package registry it prints the reason
/// and passes.
pub(crate) fn test(root: &Path) -> Result<(), String> {
    let python = match environment(root, &TEST_TOOLS) {
        Ok(python) => python,
        Err(why) => {
            println!("SKIPPED: the Python tests did not run: {why}");
            return Ok(());
        }
    };
    let package = linked_package(root)?;
    let on_package = || {
        let mut command = Command::new(&python);
        command.env("PYTHONPATH", &package).env("PYTHONDONTWRITEBYTECODE", "1").current_dir(root);
        command
    };
    let timed = on_package().args(["-c", IMPORT_TIME]).output().map_err(|why| why.to_string())?;
    let milliseconds = String::from_utf8_lossy(&timed.stdout).trim().parse::<f64>();
    let milliseconds = milliseconds.map_err(|_| String::from_utf8_lossy(&timed.stderr).into_owned())?;
    println!("import: {milliseconds:.1} ms");
    if milliseconds > IMPORT_LIMIT {
        return Err(format!("an import takes {milliseconds:.1} ms, the limit is {IMPORT_LIMIT} ms"));
    }
    run(on_package().args(["-m", "mypy.stubtest", "--concise", "tilewright._core"]))?;
    run(on_package().args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs"]).arg(root.join(TESTS)))
}

/// Links the Python sources and the library of the development profile to a package; returns the folder that holds it. The
/// workspace is built with the features of its tests, so that they share what is compiled.
pub(crate) fn linked_package(root: &Path) -> Result<PathBuf, String> {
    run(cargo().args(["build", "--workspace"]).current_dir(root))?;
    let folder = target(root).join("python-package");
    let _ = fs::remove_dir_all(&folder); // of an earlier version
    let package = folder.join("tilewright");
    let link = || {
        fs::create_dir_all(&package)?;
        for source in fs::read_dir(root.join("crates/tilewright-python/python/tilewright"))? {
            let source = source?;
            symlink(source.path(), package.join(source.file_name()))?;
        }
        symlink(target(root).join("debug/libtilewright_python.so"), package.join("_core.abi3.so"))
    };
    link().map_err(|why: io::Error| format!("cannot link {}: {why}", package.display()))?;
    Ok(folder)
}

/// Runs a seeded sample of FlashInfer's own tests, from a checkout of release 0.6.18, on the CPU or with `--gpu`. Expected failures are
/// listed with their reasons; another failure, or a pass of one of these, is an error. `options` are those of the plugin and of pytest.
pub(crate) fn flashinfer(root: &Path, checkout: &str, options: &[&str]) -> Result<(), String> {
    let python = environment(root, &[TEST_TOOLS.as_slice(), &[BUILDER, "einops", "scipy"]].concat())?;
    let wheel = wheel(root, &python, "wheel", "suite", &[])?;
    let install = ["-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"];
    run(Command::new(&python).args(install).arg(&wheel))?;
    let mut pytest = Command::new(&python);
    flashinfer_suite(root, pytest.args(["-m", "pytest"]), Path::new(checkout), None)?;
    pytest.args(suite().map(|file| format!("tests/{file}"))).args(options);
    run(pytest.env("PYTHONDONTWRITEBYTECODE", "1"))
}

/// Adds the plugin of FlashInfer's tests to a call of pytest. `package` holds the package if it is not installed.
pub(crate) fn flashinfer_suite(
    root: &Path,
    pytest: &mut Command,
    checkout: &Path,
    package: Option<&Path>,
) -> Result<(), String> {
    let plugin = root.join(TESTS).join("flashinfer_suite");
    let folders = [plugin.as_path(), checkout].into_iter().chain(package);
    let paths = std::env::join_paths(folders).map_err(|why| why.to_string())?;
    let plugins = ["--noconftest", "-p", "suite_plugin", "-p", "no:cacheprovider"];
    pytest.args(plugins).args(["-q", "--tb=no", "-rfE", "--disable-warnings"]);
    pytest.current_dir(checkout).env("PYTHONPATH", paths);
    Ok(())
}

/// The interpreter of an environment with these tools, which are installed once.
fn environment(root: &Path, tools: &[&str]) -> Result<PathBuf, String> {
    let folder = target(root).join("python-tools");
    let (python, list) = (folder.join("bin/python"), folder.join("installed"));
    let installed = fs::read_to_string(&list).unwrap_or_default();
    let missing: Vec<&str> =
        tools.iter().copied().filter(|tool| !installed.lines().any(|line| line == *tool)).collect();
    if missing.is_empty() {
        return Ok(python);
    }
    println!("installing {} into {}", missing.join(", "), folder.display());
    // packages of the machine, torch for one, are used where they exist
    run(Command::new("python3").args(["-m", "venv", "--system-site-packages"]).arg(&folder))?;
    run(Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
        .args(&missing))?;
    fs::write(&list, installed + &missing.join("\n") + "\n").map_err(|why| why.to_string())?;
    Ok(python)
}

/// Builds a wheel with a cargo profile and further options in a folder of `target/wheels`; returns its path.
fn wheel(
    root: &Path,
    python: &Path,
    profile: &str,
    folder: &str,
    options: &[&str],
) -> Result<PathBuf, String> {
    let folder = target(root).join("wheels").join(folder);
    let _ = fs::remove_dir_all(&folder); // of an earlier version
    let mut maturin = Command::new(python);
    maturin
        .args(["-m", "maturin", "build", "--quiet", "--profile", profile, "--manifest-path"])
        .arg(root.join(MANIFEST));
    maturin.args(options).arg("--out").arg(&folder).env("CARGO_TARGET_DIR", target(root));
    run(maturin.env("CARGO_ZIGBUILD_PYTHON_PATH", python))?;
    let entries = fs::read_dir(&folder).map_err(|why| format!("cannot read {}: {why}", folder.display()))?;
    let mut wheels = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension() == Some(OsStr::new("whl")));
    wheels.next().ok_or_else(|| format!("maturin left no wheel in {}", folder.display()))
}
