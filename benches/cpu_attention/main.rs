//! CPU attention benchmark over `benches/definitions/cpu-attention.toml`: each case is timed in the same rounds as its
//! baseline, torch and the machine's roofline. CONTRIBUTING.md has the command line.

mod case;
mod chart;
mod peer;
mod prepared;
mod record;
mod rounds;

use case::Case;
use clap::Parser;
use peer::Peer;
use record::{Machine, Outcome};
use std::{error::Error, path::PathBuf, process::ExitCode};
use tilewright::Cpu;

/// Times attention on the CPU and compares it with the machine's roofline and an optional peer.
#[derive(Parser)]
#[command(name = "cargo bench --bench cpu_attention --")]
struct BenchArgs {
    /// A Python with torch; without it no peer is timed.
    #[arg(long)]
    peer: Option<String>,
    /// Write the results to this CSV file, and a chart of the speedups over torch next to it.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Measured rounds, after one warm-up round.
    #[arg(long, default_value_t = 21, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Run only cases whose name contains this text, and their baselines.
    #[arg(long)]
    only: Option<String>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    match run(&BenchArgs::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &BenchArgs) -> Result<(), Box<dyn Error>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/definitions/cpu-attention.toml");
    let definitions = case::parse(&std::fs::read_to_string(path)?).map_err(|why| format!("{path}: {why}"))?;
    let cases = select_cases(&definitions, arguments.only.as_deref())?;
    if let Some(folder) = arguments.record.as_ref().and_then(|file| file.parent()) {
        std::fs::create_dir_all(folder)?;
    }

    let cpu = Cpu::new();
    let mut peer = match &arguments.peer {
        Some(python) => Some(Peer::start(python, cpu.threads())?),
        None => None,
    };
    let machine = Machine::of(&cpu, peer.as_ref().map(|peer| &peer.info), arguments.command());
    print!("{machine}");
    if peer.is_none() && cases.iter().any(|case| case.peer) {
        println!("# no --peer: what is expected beside torch is not measured, its columns stay empty");
    }

    let mut outcomes: Vec<Option<Outcome>> = cases.iter().map(|_| None).collect();
    for group in rounds::groups(&cases) {
        let members: Vec<&Case> = group.iter().map(|&at| cases[at]).collect();
        let measured = rounds::time(&cpu, peer.as_mut(), &members, arguments.rounds as usize)?;
        for (index, &at) in group.iter().enumerate() {
            let baseline = members.iter().position(|case| cases[at].baseline.as_ref() == Some(&case.name));
            let outcome =
                Outcome::new(cases[at], &measured[index], baseline.map(|baseline| &measured[baseline]));
            print!("{outcome}");
            outcomes[at] = Some(outcome);
        }
    }
    let outcomes: Vec<Outcome> = outcomes.into_iter().flatten().collect();
    println!("{}", record::summarize(&outcomes));
    if let Some(file) = &arguments.record {
        std::fs::write(file, record::csv(&machine, &outcomes))?;
        let bars: Vec<_> = outcomes.iter().flat_map(Outcome::bars).collect();
        if !bars.is_empty() {
            std::fs::write(file.with_extension("svg"), chart::draw(&machine.summary(), &bars))?;
        }
    }
    Ok(())
}

impl BenchArgs {
    /// The command line, without paths of this machine.
    fn command(&self) -> String {
        let peer = self.peer.as_ref().map_or("", |_| " --peer PYTHON");
        let only = self.only.as_ref().map_or(String::new(), |text| format!(" --only {text}"));
        format!("cargo bench --bench cpu_attention -- --rounds {}{peer}{only}", self.rounds)
    }
}

/// The cases whose name contains `only`, and their baselines.
fn select_cases<'a>(cases: &'a [Case], only: Option<&str>) -> Result<Vec<&'a Case>, String> {
    let named = |case: &&Case| only.is_none_or(|text| case.name.contains(text));
    let baselines: Vec<&String> =
        cases.iter().filter(named).filter_map(|case| case.baseline.as_ref()).collect();
    let selected: Vec<&Case> =
        cases.iter().filter(|case| named(case) || baselines.contains(&&case.name)).collect();
    if selected.is_empty() {
        let names: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        let only = only.unwrap_or_default();
        return Err(format!("--only {only} is in no name of a case; there are {}", names.join(", ")));
    }
    Ok(selected)
}
