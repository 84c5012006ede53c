//! Migration: results are delivered to the ranks to which a migration carries their tokens, not to those that sent the
//! rows (Luffy, arXiv:2411.15419, 4.3).

use crate::moe::{Error, Plan};

/// Delivers the results of token t to rank `homes[t]` of the expert group.
///
/// # Errors
/// Tokens that share a row and have different homes: the result of a row goes to one rank.
pub fn deliver(plan: Plan, homes: Option<Vec<u32>>) -> Result<Plan, Error> {
    let Some(home) = &homes else { return Ok(Plan { homes, ..plan }) };
    let tokens = plan.tokens.known();
    let parted = |(route, &row): (usize, &u32)| {
        let pair = [(route / plan.slots) as u32, tokens[row as usize]];
        (home[pair[0] as usize] != home[pair[1] as usize]).then_some(pair)
    };
    let sent = plan.places.known().iter().enumerate().filter(|(_, row)| **row != u32::MAX);
    match { sent }.find_map(parted) {
        Some(tokens) => Err(Error::SharedRow { tokens }),
        None => Ok(Plan { homes, ..plan }),
    }
}
