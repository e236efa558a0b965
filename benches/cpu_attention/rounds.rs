//! Rounds: cases that are compared take turns, so that what disturbs the machine disturbs all of them.

use crate::{
    case::{Case, Form},
    ours::Ours,
    peer::Peer,
};
use std::error::Error;
use tilewright::{Cpu, Roofline};

/// What was measured of a case, one entry a round.
pub(crate) struct Series {
    pub(crate) seconds: Vec<f64>,
    /// Of each form that the peer was timed in.
    pub(crate) peers: Vec<(Form, Vec<f64>)>,
    /// Medians over the rounds.
    pub(crate) roofline: Roofline,
    /// Bytes of keys and values that the plan reads.
    pub(crate) kv_bytes: usize,
}

/// Whose turn it is, by the place of the case in its group.
#[derive(Clone, Copy)]
enum Turn {
    Ours(usize),
    /// The form by its place among those of the case.
    Peer(usize, usize),
}

/// Divides cases into groups in which each is with its baseline; places in `cases`, in order.
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

/// Times the cases of one group in `rounds` rounds after one that does not count.
pub(crate) fn time(
    cpu: &Cpu,
    mut peer: Option<&mut Peer>,
    cases: &[&Case],
    rounds: usize,
) -> Result<Vec<Series>, Box<dyn Error>> {
    let mut ours = cases.iter().map(|case| Ours::new(cpu, case)).collect::<Result<Vec<_>, _>>()?;
    if let Some(peer) = &mut peer {
        peer.prepare(cases)?;
    }
    let none = Roofline { bytes_per_second: 0.0, flops_per_second: 0.0 };
    let forms = |case: &Case| if peer.is_some() { case.forms() } else { &[] };
    let series = |(case, ours): (&&Case, &Ours)| Series {
        seconds: Vec::new(),
        peers: forms(case).iter().map(|form| (*form, Vec::new())).collect(),
        roofline: none,
        kv_bytes: ours.kv_bytes,
    };
    let mut measured: Vec<Series> = cases.iter().zip(&ours).map(series).collect();
    let turns = |(at, series): (usize, &Series)| {
        let peers: Vec<Turn> = (0..series.peers.len()).map(|form| Turn::Peer(at, form)).collect();
        [vec![Turn::Ours(at)], peers].concat()
    };
    let turns: Vec<Turn> = measured.iter().enumerate().flat_map(turns).collect();

    let (mut memory, mut compute) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let roofline = cpu.measure_roofline();
        // another one begins each round, so that none always follows the same neighbour or the ceilings
        let begin = round % turns.len();
        for turn in turns[begin..].iter().chain(&turns[..begin]) {
            let (seconds, of) = match (*turn, &mut peer) {
                (Turn::Peer(at, form), Some(peer)) => {
                    let (form, seconds) = &mut measured[at].peers[form];
                    (peer.time(cases[at], *form)?, seconds)
                }
                (Turn::Ours(at) | Turn::Peer(at, _), _) => (ours[at].time()?, &mut measured[at].seconds),
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

/// The median over rounds of each round's `of / over`.
pub(crate) fn ratio(of: &[f64], over: &[f64]) -> f64 {
    median(&of.iter().zip(over).map(|(of, over)| of / over).collect::<Vec<_>>())
}

/// The one in the middle, the mean of two where there are two.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 }
}
