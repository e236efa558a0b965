//! Machine code in the Python wheel: a bundle of the kernels that most engines load, assembled by ptxas.
//!
//! The assembler is the last one of CUDA 12: its code loads on every supported driver, and has the registers and sizes of that of CUDA 13
//! ([reasons](../../docs/decisions/driver-and-cache.md)).

use crate::cargo::{cargo, run};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The package of ptxas, and the program in it.
const PACKAGE: &str = "nvidia-cuda-nvcc-cu12==12.9.86";
const PTXAS: &str = "nvidia/cuda_nvcc/bin/ptxas";
/// The name of the bundle beside the extension, which looks for it there.
const FOLDER: &str = "tilewright-kernels";
/// Head dims of kernels that are left out, for the size of the wheel.
const LARGE_HEADS: [&str; 2] = ["_d192_128", "_d256_256"];

/// Adds the bundle to a wheel of `output`, the folder of build outputs. Without ptxas it prints the reason.
pub(crate) fn add(root: &Path, output: &Path, python: &Path, wheel: &Path) -> Result<(), String> {
    let ptxas = match ptxas(output, python) {
        Ok(ptxas) => ptxas,
        Err(why) => {
            println!("SKIPPED: the wheel has no machine code, its kernels are JIT-compiled: {why}");
            return Ok(());
        }
    };
    let folder = output.join("wheels/unpacked");
    let _ = fs::remove_dir_all(&folder); // of an earlier call
    let tool = |command: &str| {
        let mut tool = Command::new(python);
        tool.args(["-m", "wheel", command]);
        tool
    };
    run(tool("unpack").arg("--dest").arg(&folder).arg(wheel))?;
    let unpacked = fs::read_dir(&folder).ok().and_then(|mut entries| entries.next()?.ok());
    let unpacked = unpacked.ok_or_else(|| format!("{} is empty", folder.display()))?.path();
    let bundle = unpacked.join("tilewright").join(FOLDER);
    let mut command = cargo();
    command
        .current_dir(root)
        .args(["run", "--quiet", "--package", "tilewright-cli", "--", "kernels", "bundle"]);
    command.arg(&bundle).args(["--arch", "90", "--ptxas"]).arg(&ptxas).arg("--").args(kernels());
    run(&mut command)?;
    let parent = wheel.parent().unwrap_or(root);
    run(tool("pack").arg("--dest-dir").arg(parent).arg(&unpacked))?;
    fs::remove_dir_all(&folder).map_err(|why| format!("{}: {why}", folder.display()))
}

/// The names of the kernels for Hopper.
fn kernels() -> Vec<String> {
    let for_hopper = tilewright_kernels::common().into_iter().filter(|kernel| kernel.archs.contains(&90));
    for_hopper
        .map(|kernel| kernel.name)
        .filter(|name| !LARGE_HEADS.iter().any(|dims| name.contains(dims)))
        .collect()
}

/// The assembler, which is installed once.
fn ptxas(output: &Path, python: &Path) -> Result<PathBuf, String> {
    let folder = output.join("cuda-12-tools");
    let ptxas = folder.join(PTXAS);
    if !ptxas.exists() {
        println!("installing {PACKAGE} into {} (40 MB to download)", folder.display());
        let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"];
        run(Command::new(python).args(install).arg("--target").arg(&folder).arg(PACKAGE))?;
    }
    if ptxas.exists() { Ok(ptxas) } else { Err(format!("{PACKAGE} has no {PTXAS}")) }
}

#[cfg(test)]
mod tests {
    use super::kernels;

    #[test]
    fn the_wheel_has_kernels_of_decode_steps_and_prompts() {
        let names = kernels();
        for kernel in [
            "attention_bf16_bf16_d128_128_few_sm90",
            "attention_f16_e4m3_d64_64_wgmma",
            "attention_scalar_bf16_bf16_d128_128",
            "attention_bf16_bf16_d576_512_mla_wgmma64",
            "append_numbers_bf16_bf16_8",
            "sample_logits_f32_8x256",
        ] {
            assert!(names.iter().any(|name| name == kernel), "{kernel} is missing in {names:?}");
        }
        let is_unwanted = |name: &String| name.contains("_d256_") || name.contains("_few_sm80");
        assert!(!names.iter().any(is_unwanted), "{names:?}");
    }
}
