//! Interleaved rounds: compared cases take turns, so that machine noise affects all of them.

use crate::{
    case::{Case, Form},
    peer::Peer,
    prepared::PreparedCase,
};
use std::error::Error;
use tilewright::{Cpu, Roofline};

/// The measurements of a case, one entry per round.
pub(crate) struct Series {
    pub(crate) seconds: Vec<f64>,
    /// Seconds of the peer, per form.
    pub(crate) peers: Vec<(Form, Vec<f64>)>,
    /// Medians over the rounds.
    pub(crate) roofline: Roofline,
    /// Bytes of keys and values that the plan reads.
    pub(crate) kv_bytes: usize,
}

/// A timed call: the case by its index in the group.
#[derive(Clone, Copy)]
enum Turn {
    Engine(usize),
    /// Index of the case, and index of the form in the case.
    Peer(usize, usize),
}

/// Groups each case with its baseline; indices into `cases`, sorted.
pub(crate) fn groups(cases: &[&Case]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = (0..cases.len()).map(|at| vec![at]).collect();
    for case in cases {
        let Some(baseline) = &case.baseline else { continue };
        let of = |groups: &[Vec<usize>], name: &str| {
            groups.iter().position(|group| group.iter().any(|&at| cases[at].name == *name))
        };
        if let (Some(mine), Some(its)) = (of(&groups, &case.name), of(&groups, baseline))
            && mine != its
        {
            let joining = groups.remove(mine.max(its));
            groups[mine.min(its)].extend(joining);
        }
    }
    groups.iter_mut().for_each(|group| group.sort_unstable());
    groups
}

/// Times the cases of one group in `rounds` rounds, after one warm-up round.
pub(crate) fn time(
    cpu: &Cpu,
    mut peer: Option<&mut Peer>,
    cases: &[&Case],
    rounds: usize,
) -> Result<Vec<Series>, Box<dyn Error>> {
    let mut prepared =
        cases.iter().map(|case| PreparedCase::new(cpu, case)).collect::<Result<Vec<_>, _>>()?;
    if let Some(peer) = &mut peer {
        peer.prepare(cases)?;
    }
    let zero = Roofline { bytes_per_second: 0.0, flops_per_second: 0.0 };
    let forms = |case: &Case| if peer.is_some() { case.forms() } else { &[] };
    let series = |(case, prepared): (&&Case, &PreparedCase)| Series {
        seconds: Vec::new(),
        peers: forms(case).iter().map(|form| (*form, Vec::new())).collect(),
        roofline: zero,
        kv_bytes: prepared.kv_bytes,
    };
    let mut measured: Vec<Series> = cases.iter().zip(&prepared).map(series).collect();
    let turns = |(at, series): (usize, &Series)| {
        let peers: Vec<Turn> = (0..series.peers.len()).map(|form| Turn::Peer(at, form)).collect();
        [vec![Turn::Engine(at)], peers].concat()
    };
    let turns: Vec<Turn> = measured.iter().enumerate().flat_map(turns).collect();

    let (mut memory, mut compute) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let roofline = cpu.measure_roofline();
        // rotate the order, so that no call always follows the same call or the roofline measurement
        let begin = round % turns.len();
        for turn in turns[begin..].iter().chain(&turns[..begin]) {
            let (seconds, of) = match (*turn, &mut peer) {
                (Turn::Peer(at, form), Some(peer)) => {
                    let (form, seconds) = &mut measured[at].peers[form];
                    (peer.time(cases[at], *form)?, seconds)
                }
                (Turn::Engine(at) | Turn::Peer(at, _), _) => {
                    (prepared[at].time()?, &mut measured[at].seconds)
                }
            };
            if round > 0 {
                of.push(seconds);
            }
        }
        if round > 0 {
            memory.push(roofline.bytes_per_second);
            compute.push(roofline.flops_per_second);
        }
    }
    let roofline = Roofline { bytes_per_second: median(&memory), flops_per_second: median(&compute) };
    measured.iter_mut().for_each(|series| series.roofline = roofline);
    Ok(measured)
}

/// The median of the per-round ratios `of / over`.
pub(crate) fn ratio(of: &[f64], over: &[f64]) -> f64 {
    median(&of.iter().zip(over).map(|(of, over)| of / over).collect::<Vec<_>>())
}

/// The median; the mean of the middle two for an even count.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 }
}
